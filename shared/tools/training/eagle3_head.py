"""The EAGLE-3 head in the form in which it is trained: whole texts at once, several drafted steps deep.

Slot p of a text holds token p + 1 and the target's hidden states at p, and guesses token p + 2. When it
drafts, the head goes on from its own hidden states, which it would never have seen if it were trained on the
target's alone. So it is unrolled here: in step t slot p takes what step t - 1 gave for slot p - 1
(training-time test). It attends to what a drafting head would find: slots up to p - t, made from the target's
hidden states, and its own branch of t drafted slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from diptych.shared.tools.training.head_layers import (
    attention_linears,
    init_head,
    mlp_linears,
    rotate,
    swiglu,
)


class Eagle3Shape(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_features: int  # layers of the target whose inputs it takes
    rms_norm_eps: float
    rope_theta: float


class Slots(NamedTuple):
    """The slots from which tokens are drafted, each tensor [num_rows, num_slots]."""

    indices: torch.Tensor  # where in the row
    is_slot: torch.Tensor  # False: there only to make rows equally long
    follows: torch.Tensor  # the slot before is the one before it in the text


class Eagle3Head(nn.Module):
    """Parameters have the names of public checkpoints."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden_size = shape.hidden_size
        self.shape = shape
        self.fc = nn.Linear(shape.num_features * hidden_size, hidden_size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = nn.RMSNorm(hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(hidden_size, shape.vocab_size, bias=False)
        init_head(self)

    def forward(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        slots: Slots,
        num_steps: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """embeds [num_rows, row_len, hidden_size] of the *next* token; features [num_rows, row_len,
        num_features * hidden_size]. A text in each row.

        For each step: log-probabilities [num_drafted, vocab_size], and which slots they belong to: bool
        [num_rows, num_slots].
        """
        positions = torch.arange(embeds.shape[1], device=embeds.device)
        hidden = self.fc(features)
        keys, values = self.midlayer.keys_and_values(embeds, hidden, positions)
        embeds, hidden = at_slots(embeds, slots), at_slots(hidden, slots)
        distance = slots.indices[..., None] - positions
        positions = slots.indices

        results, is_drafted = [], slots.is_slot
        branch: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of the drafted slots, by step
        # --8<-- [start:training-time-test]
        for step in range(num_steps):
            if step > 0:
                hidden = hidden.roll(1, dims=1)
                is_drafted = is_drafted & is_drafted.roll(1, dims=1) & slots.follows
                branch = [(k.roll(1, dims=1), v.roll(1, dims=1)) for k, v in branch]
                branch.append(self.midlayer.keys_and_values(embeds, hidden, positions))
            mask = distance >= step
            hidden = self.midlayer(embeds, hidden, positions, keys, values, mask, branch)
            logits = self.lm_head(self.norm(hidden[is_drafted]))
            results.append((logits.float().log_softmax(-1), is_drafted))
        # --8<-- [end:training-time-test]
        return results


class Eagle3Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden_size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(hidden_size, eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.self_attn = attention_linears(2 * hidden_size, hidden_size, *sizes)
        self.mlp = mlp_linears(hidden_size, shape.intermediate_size)

    def keys_and_values(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_rows, n, num_heads, head_dim]: those of a KV head once for each of its query heads."""
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        k = rotate(self._heads("k_proj", x), positions, self.shape.rope_theta)
        num_repeats = self.shape.num_heads // self.shape.num_kv_heads
        return k.repeat_interleave(num_repeats, 2), self._heads("v_proj", x).repeat_interleave(num_repeats, 2)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        branch: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """keys, values [num_rows, row_len, ...] of the text, seen as `mask` [num_rows, num_slots, row_len]
        says; those of `branch`, [num_rows, num_slots, ...] each, are seen by the slot at the same place."""
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        q = rotate(self._heads("q_proj", x), positions, self.shape.rope_theta) * self.shape.head_dim**-0.5
        scores = torch.einsum("rmhd,rthd->rhmt", q, keys).masked_fill(~mask[:, None], -torch.inf)
        own = [torch.einsum("rmhd,rmhd->rhm", q, k)[..., None] for k, _ in branch]
        probs = torch.cat((scores, *own), dim=-1).softmax(-1).split([mask.shape[-1]] + [1] * len(own), dim=-1)
        output = torch.einsum("rhmt,rthd->rmhd", probs[0], values)
        for prob, (_, v) in zip(probs[1:], branch):
            output = output + prob.transpose(1, 2) * v
        hidden = hidden + self.self_attn["o_proj"](output.flatten(2))
        return hidden + swiglu(self.mlp, self.post_attention_layernorm(hidden))

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.self_attn[name](x).unflatten(-1, (-1, self.shape.head_dim))


def at_slots(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """[num_rows, row_len, n] -> [num_rows, num_slots, n]."""
    return x.gather(1, slots.indices[..., None].expand(-1, -1, x.shape[-1]))


def find_slots(is_slot: torch.Tensor) -> Slots:
    """is_slot bool [num_rows, row_len]."""
    num_slots = is_slot.sum(1)
    width = max(1, int(num_slots.max()))
    # A stable sort puts a row's slots first, in order.
    indices = (~is_slot).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    valid = torch.arange(width, device=is_slot.device) < num_slots[:, None]
    follows = torch.zeros_like(valid)
    follows[:, 1:] = indices[:, 1:] == indices[:, :-1] + 1
    return Slots(indices, valid, follows)
