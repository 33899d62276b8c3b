"""Linear attention token by token: a gated delta rule over one state for each head of a request.

A state S maps keys to values: Sᵀk is what it remembers under the key k. A new token first lets all of S
decay, then corrects what S has under its key towards its own value (the delta rule), then reads under its
query.

The state cannot be cut back, so drafts are not in it until they are accepted: their inputs are held, and the
next step of the request begins with the accepted ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from diptych.shared.interfaces import linear_attention as interface
from diptych.shared.interfaces.linear_attention import LinearLayer, StatePool
from diptych.shared.types import ForwardBatch, ForwardMode


class Tokens(NamedTuple):
    """The new tokens of a request: rows [start, end) of the batch."""

    row: int  # of the pool
    start: int
    end: int
    is_first: bool  # there is no token before them
    are_drafts: bool
    num_accepted: int  # drafts of the last step that come before them
    stores: list[tuple[int, int]]  # (so many of them, the row that gets the state after them)


class LinearAttention(interface.LinearAttention):
    supports_drafts = True
    supports_channel_decay = True

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool

    def plan(self, forward_batch: ForwardBatch) -> list[Tokens]:
        rows = forward_batch.req_pool_indices.tolist()
        are_drafts = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
        lens = list(zip(rows, forward_batch.seq_lens_cpu, forward_batch.extend_seq_lens_cpu))
        # The state behind drafts is not kept: they may be rejected.
        stores = [
            [(0, row)] if are_drafts else [*self.pool.begin(row, end - num, end), (num, row)]
            for row, end, num in lens
        ]
        num_accepted = self.pool.num_accepted(forward_batch).tolist()
        plan, start = [], 0
        for (row, end, num), accepted, copies in zip(lens, num_accepted, stores):
            plan.append(Tokens(row, start, start + num, num == end, are_drafts, accepted, copies))
            start += num
        return plan

    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: list[Tokens]
    ) -> torch.Tensor:
        inputs, states = self.pool.inputs[layer.layer_id], self.pool.recurrent[layer.layer_id]
        num_heads, outputs = beta.shape[1], []
        gates = torch.cat((g.flatten(1), beta), dim=1)
        # --8<-- [start:linear-attention-run]
        for row, start, end, is_first, are_drafts, num_accepted, stores in plan:
            if is_first:
                inputs[row], states[row] = 0.0, 0.0
            new = u[start:end].to(inputs.dtype), gates[start:end]
            held = self.pool.held_inputs[layer.layer_id, row], self.pool.held_gates[layer.layer_id, row]
            all_u, all_gates = (torch.cat((old[:num_accepted], x)) for old, x in zip(held, new))
            seen, state = torch.cat((inputs[row], all_u)), states[row]
            q, k, v = split_heads(convolve(seen, layer.conv_weight), layer)
            all_g, all_beta = all_gates[:, :-num_heads], all_gates[:, -num_heads:]
            tokens = zip(q, k, v, all_g.unflatten(1, (num_heads, -1)), all_beta)
            for n, token in enumerate(tokens, 1 - num_accepted):
                state, output = delta_rule(state, *token)
                outputs += [output] if n > 0 else []
                for target in [target for num, target in stores if num == n]:
                    inputs[target] = seen[num_accepted + n :][: inputs.shape[1]]
                    states[target] = state
            if are_drafts:
                held[0][: end - start], held[1][: end - start] = new
        return torch.stack(outputs).to(u.dtype)
        # --8<-- [end:linear-attention-run]


# --8<-- [start:convolve]
def convolve(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """seen [conv_kernel - 1 + n, num_channels], weight [num_channels, conv_kernel] ->
    [n, num_channels] float32. Each channel: the weighted sum of a token and those
    before it, then SiLU."""
    wide = torch.promote_types(seen.dtype, torch.float32)
    windows = seen.to(wide).unfold(0, weight.shape[1], 1)  # [n, num_channels, conv_kernel]
    return F.silu((windows * weight.to(wide)).sum(-1))
    # --8<-- [end:convolve]


def split_heads(c: torch.Tensor, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, num_channels] -> q, k [n, num_v_heads, k_head_dim], v [n, num_v_heads, v_head_dim]. Key heads are
    repeated for their value heads, and of length 1; q is divided by sqrt(k_head_dim), too."""
    config = layer.config
    q, k, v = c.split((config.k_size, config.k_size, config.v_size), dim=-1)
    repeats = config.num_v_heads // config.num_k_heads

    def unit_heads(x: torch.Tensor) -> torch.Tensor:
        x = x.view(len(x), config.num_k_heads, config.k_head_dim)
        x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(repeats, dim=1)

    v = v.view(len(v), config.num_v_heads, config.v_head_dim)
    return unit_heads(q) * config.k_head_dim**-0.5, unit_heads(k), v


# --8<-- [start:delta-rule]
def delta_rule(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. state [heads, k_head_dim, v_head_dim]; q, k [heads, k_head_dim];
    v [heads, v_head_dim]; g [heads, 1], or a decay for each channel of k (KDA)
    [heads, k_head_dim]; beta [heads] -> the new state, and the output
    [heads, v_head_dim]."""
    state = g.exp()[:, :, None] * state
    remembered = torch.einsum("hkv,hk->hv", state, k)
    correction = beta[:, None] * (v - remembered)
    state = state + k[:, :, None] * correction[:, None, :]
    return state, torch.einsum("hkv,hk->hv", state, q)
    # --8<-- [end:delta-rule]
