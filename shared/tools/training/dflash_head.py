"""The DFlash head in the form in which it is trained: many blocks of a text at once.

A block begins at an anchor, a token of the answer whose text before it the target has read. The masks behind
it are filled in together. All blocks of a text read the same K and V of its features, each up to its anchor.
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


class DFlashShape(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_features: int  # layers of the target whose inputs it takes
    rms_norm_eps: float
    rope_theta: float
    block_len: int


class DFlashHead(nn.Module):
    """Parameters have the names of public checkpoints. Embedding and head are the target's."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        hidden_size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.fc = nn.Linear(shape.num_features * hidden_size, hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps)
        self.layers = nn.ModuleList(DFlashLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(hidden_size, eps)
        init_head(self)

    def forward(self, embeds: torch.Tensor, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """embeds [num_texts, num_blocks, block_len, hidden_size] of each block: the anchor's token, and
        masks; anchors [num_texts, num_blocks]: the positions of the first; features [num_texts, text_len,
        num_features * hidden_size]. Returns what the head takes, in the form of `embeds`."""
        context = self.hidden_norm(self.fc(features.to(embeds.dtype)))
        text = torch.arange(features.shape[1], device=features.device)
        in_block = torch.arange(self.shape.block_len, device=features.device)
        is_before = text < anchors[..., None]
        x = embeds
        for layer in self.layers:
            x = layer(x, anchors[..., None] + in_block, context, text, is_before)
        normed: torch.Tensor = self.norm(x)
        return normed


class DFlashLayer(nn.Module):
    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        hidden_size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.self_attn = attention_linears(hidden_size, hidden_size, *sizes)
        self.self_attn["q_norm"] = nn.RMSNorm(shape.head_dim, eps)
        self.self_attn["k_norm"] = nn.RMSNorm(shape.head_dim, eps)
        self.mlp = mlp_linears(hidden_size, shape.intermediate_size)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        context: torch.Tensor,
        text: torch.Tensor,
        is_before: torch.Tensor,
    ) -> torch.Tensor:
        """is_before [num_texts, num_blocks, text_len]: what a block sees of its text."""
        normed = self.input_layernorm(x)
        q = rotate(self._heads("q", normed), positions, self.shape.rope_theta) * self.shape.head_dim**-0.5
        own_k, own_v = self._keys_and_values(normed, positions)
        text_k, text_v = self._keys_and_values(context, text)
        # --8<-- [start:a-block-sees-all-of-itself]
        seen = torch.einsum("rbmhd,rthd->rbhmt", q, text_k)
        seen = seen.masked_fill(~is_before[:, :, None, None], -torch.inf)
        own = torch.einsum("rbmhd,rbnhd->rbhmn", q, own_k)  # no mask
        probs = torch.cat((seen, own), dim=-1).softmax(-1)
        seen, own = probs.split([text.shape[0], own.shape[-1]], dim=-1)
        heads = torch.einsum("rbhmt,rthd->rbmhd", seen, text_v) + torch.einsum(
            "rbhmn,rbnhd->rbmhd", own, own_v
        )
        # --8<-- [end:a-block-sees-all-of-itself]
        x = x + self.self_attn["o_proj"](heads.flatten(-2))
        return x + swiglu(self.mlp, self.post_attention_layernorm(x))

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        heads = self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.shape.head_dim))
        normed: torch.Tensor = self.self_attn[f"{name}_norm"](heads)
        return normed

    def _keys_and_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n, num_heads, head_dim]: those of a KV head once for each of its query heads."""
        k = rotate(self._heads("k", x), positions, self.shape.rope_theta)
        v = self.self_attn["v_proj"](x).unflatten(-1, (-1, self.shape.head_dim))
        num_repeats = self.shape.num_heads // self.shape.num_kv_heads
        return k.repeat_interleave(num_repeats, -2), v.repeat_interleave(num_repeats, -2)
