"""Stage 15, linear attention: complete the functions that raise NotImplementedError.

diptych course grade 15     # in the folder of `diptych course start`
diptych check --stage 15 my_linear_attention.py

The contract is in shared/interfaces/linear_attention.py. The pool has for each layer and row the last
inputs of the convolution, `inputs` [layers, rows, conv_kernel - 1, num_channels], and the state, `recurrent`
[layers, rows, num_v_heads, k_head_dim, v_head_dim]. A row is that of a request, or a checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.shared.interfaces import linear_attention as interface
from diptych.shared.interfaces.linear_attention import LinearLayer, StatePool
from diptych.shared.types import ForwardBatch


class Tokens(NamedTuple):
    """The new tokens of a request: rows [start, end) of the batch."""

    row: int  # of the pool
    start: int
    end: int
    is_first: bool  # the request has no token before them
    stores: dict[int, int]  # after so many of them -> the checkpoint that the state is copied to


class MyLinearAttention(interface.LinearAttention):
    def __init__(self, pool: StatePool) -> None:
        self.pool = pool

    def plan(self, forward_batch: ForwardBatch) -> list[Tokens]:
        rows = forward_batch.req_pool_indices.tolist()
        plan, start = [], 0
        for row, seq_len, num_new in zip(rows, forward_batch.seq_lens_cpu, forward_batch.extend_seq_lens_cpu):
            stores = dict(self.pool.begin(row, seq_len - num_new, seq_len))
            plan.append(Tokens(row, start, start + num_new, num_new == seq_len, stores))
            start += num_new
        return plan

    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: list[Tokens]
    ) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for tokens in plan:
            new = slice(tokens.start, tokens.end)
            inputs, state = self.before(tokens, layer)
            seen = torch.cat((inputs, u[new].to(inputs.dtype)))
            q, k, v = split_heads(convolve(seen, layer.conv_weight), layer)
            for n, token in enumerate(zip(q, k, v, g[new], beta[new]), 1):
                state, output = delta_rule(state, *token)
                outputs.append(output)
                if n in tokens.stores:
                    self.keep(tokens.stores[n], n, seen, state, layer)
            self.after(tokens, seen, state, layer)
        return torch.stack(outputs).to(u.dtype)

    def before(self, tokens: Tokens, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """What the request goes on from: the inputs [conv_kernel - 1, num_channels] before its new tokens,
        and its state. Both are zero before position 0."""
        raise NotImplementedError("TODO prompt: what is there before the first token?")

    def after(self, tokens: Tokens, seen: torch.Tensor, state: torch.Tensor, layer: LinearLayer) -> None:
        """Write what the next step of the request needs into its row. seen [conv_kernel - 1 + number of new
        tokens, num_channels]: the inputs of `before`, and those of the new tokens."""
        raise NotImplementedError("TODO prompt: which inputs does the next token read?")

    def keep(
        self, checkpoint: int, n: int, seen: torch.Tensor, state: torch.Tensor, layer: LinearLayer
    ) -> None:
        """Copy what a request goes on from after `n` of its new tokens to the row `checkpoint`. `state` is
        that after them; `seen` as in `after`, with the tokens that follow."""
        raise NotImplementedError("TODO checkpoints: which inputs belong to this state?")


def convolve(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """seen [conv_kernel - 1 + n, num_channels], weight [num_channels, conv_kernel] -> [n, num_channels]
    float32: for each channel the weighted sum of a token (the last weight) and of those before it, then SiLU.
    In float32."""
    raise NotImplementedError("TODO prompt: a window of conv_kernel inputs for each token")


def split_heads(c: torch.Tensor, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """c [n, num_channels] -> q, k [n, num_v_heads, k_head_dim], v [n, num_v_heads, v_head_dim]. A row of c
    is all heads of q, all of k, all of v (`layer.config.k_size`, `k_size` and `v_size` numbers). Value head h
    reads key head h // (num_v_heads // num_k_heads). q and k are divided by sqrt(sum of squares of their head
    + 1e-6); q then by sqrt(k_head_dim)."""
    raise NotImplementedError("TODO prompt: cut, norm, repeat")


def delta_rule(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. state [heads, k_head_dim, v_head_dim]; q, k [heads, k_head_dim]; v [heads, v_head_dim];
    g, beta [heads] -> the new state, and the output [heads, v_head_dim]."""
    raise NotImplementedError("TODO prompt: decay, correct, read")
