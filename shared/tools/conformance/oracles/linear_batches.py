"""Batches of linear attention, and the recurrence in float64, one request and one head at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.interfaces import LinearAttention, LinearLayer, StatePool
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poison_, run_poisoned
from diptych.shared.types import ForwardBatch, ForwardMode

NUM_LAYERS, LAYER = 3, 1
NUM_CHECKPOINTS = 3


class LinearCase(Case):
    """`steps`: for each step, the new tokens of each request; 0: the request is not in the batch."""

    steps: tuple[tuple[int, ...], ...] = ((5,),)
    num_k_heads: int = 2
    num_v_heads: int = 4
    k_head_dim: int = 16
    v_head_dim: int = 16
    conv_kernel: int = 4
    dtype: torch.dtype = torch.float32
    decay: float = 1.0  # scale of g
    seed: int = 0

    def check(self) -> None:
        if (
            min(self.num_k_heads, self.num_v_heads, self.k_head_dim, self.v_head_dim, self.conv_kernel - 1)
            < 1
        ):
            raise ValueError("heads, columns, and a convolution over at least two tokens")
        if self.num_v_heads % self.num_k_heads or len({len(step) for step in self.steps}) != 1:
            raise ValueError("whole groups of heads, and every step names every request")
        if not all(any(step) for step in self.steps):
            raise ValueError("a token in every step")

    @property
    def config(self) -> LinearAttentionConfig:
        return LinearAttentionConfig(
            self.num_k_heads, self.num_v_heads, self.k_head_dim, self.v_head_dim, self.conv_kernel
        )


@dataclass(frozen=True)
class Sequence:
    """All tokens of a request. u [n, num_channels]; g, beta [n, num_v_heads] float32."""

    u: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class World:
    """A pool whose rows hold NaN, a layer, and requests on rows in no order."""

    case: LinearCase
    pool: StatePool
    layer: LinearLayer
    sequences: list[Sequence]
    rows: list[int]

    def inputs_of(self, step: int) -> tuple[list[int], list[torch.Tensor], ForwardBatch]:
        """The requests in a step; u, g and beta of its tokens; and the batch."""
        lens = self.case.steps[step]
        before = [sum(earlier[i] for earlier in self.case.steps[:step]) for i in range(len(lens))]
        reqs = [i for i, num_new in enumerate(lens) if num_new > 0]
        spans = [(self.sequences[i], before[i], before[i] + lens[i]) for i in reqs]
        u = torch.cat([each.u[start:end] for each, start, end in spans])
        g = torch.cat([each.g[start:end] for each, start, end in spans])
        beta = torch.cat([each.beta[start:end] for each, start, end in spans])
        batch = forward_batch([self.rows[i] for i in reqs], [(start, end) for _, start, end in spans])
        return reqs, [u, g, beta], batch

    def step(self, impl: LinearAttention, step: int) -> dict[int, torch.Tensor]:
        """Run one step; the output of each request in it."""
        reqs, inputs, batch = self.inputs_of(step)
        output = run_poisoned(impl.run, *map(amid_poison, inputs), self.layer, impl.plan(batch))
        return dict(zip(reqs, output.split(list(batch.extend_seq_lens_cpu))))

    def padded_step(self, impl: LinearAttention, step: int, plan: Any, size: int) -> dict[int, torch.Tensor]:
        """Run a decode step with a plan for graphs of `size` requests; the tokens of padding are NaN."""
        reqs, inputs, batch = self.inputs_of(step)
        impl.replan(plan, batch)
        nan = [torch.full_like(x[:1], torch.nan).expand(size - len(reqs), *x.shape[1:]) for x in inputs]
        u, g, beta = (amid_poison(torch.cat(pair)) for pair in zip(inputs, nan))
        return dict(zip(reqs, impl.run(u, g, beta, self.layer, plan).split(1)))


def forward_batch(rows: list[int], spans: list[tuple[int, int]]) -> ForwardBatch:
    """Only what linear attention reads is meaningful: `spans`: positions [start, end) of new tokens."""
    lens = [end - start for start, end in spans]
    device = check_device()
    num_tokens = sum(lens)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if max(lens) == 1 else ForwardMode.EXTEND,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(start, end) for start, end in spans]).to(device),
        req_pool_indices=torch.tensor(rows, device=device),
        seq_lens=torch.tensor([end for _, end in spans], device=device),
        out_cache_loc=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        extend_seq_lens=torch.tensor(lens, device=device),
        extend_start_loc=torch.tensor([0, *accumulate(lens)][:-1], device=device),
        seq_lens_cpu=tuple(end for _, end in spans),
        extend_seq_lens_cpu=tuple(lens),
    )


def world_of(case: LinearCase) -> World:
    inputs, config = Inputs(case.seed), case.config
    totals = [sum(step[i] for step in case.steps) for i in range(len(case.steps[0]))]
    pool = StatePool(len(totals) + 2, NUM_LAYERS, config, case.dtype, check_device(), NUM_CHECKPOINTS)
    poison_(pool.inputs)
    poison_(pool.recurrent)
    weight = inputs.normal(config.num_channels, config.conv_kernel, dtype=case.dtype, std=0.5)
    sequences = [
        Sequence(
            inputs.normal(num_tokens, config.num_channels, dtype=case.dtype),
            -case.decay * inputs.uniform(num_tokens, config.num_v_heads),
            inputs.uniform(num_tokens, config.num_v_heads),
        )
        for num_tokens in totals
    ]
    rows = [1 + int(i) for i in inputs.permutation(len(totals) + 1)[: len(totals)]]
    return World(case, pool, LinearLayer(LAYER, config, weight), sequences, rows)


def recurrence(
    case: LinearCase, weight: torch.Tensor, tokens: Sequence, end: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, of all tokens or of the first `end`: outputs [n, num_v_heads, v_head_dim] and the last
    state, float64 on the CPU."""
    config, weight = case.config, weight.cpu().double()
    u, g, beta = (each[:end].cpu().double() for each in (tokens.u, tokens.g, tokens.beta))
    padded = torch.cat((torch.zeros(config.conv_kernel - 1, u.shape[1]).double(), u))
    taps = [weight[:, j] * padded[j : j + len(u)] for j in range(config.conv_kernel)]
    c = torch.nn.functional.silu(torch.stack(taps).sum(0))
    outputs = torch.zeros(len(u), config.num_v_heads, config.v_head_dim).double()
    states = torch.zeros(config.num_v_heads, config.k_head_dim, config.v_head_dim).double()
    for head in range(config.num_v_heads):
        k_start = head // (config.num_v_heads // config.num_k_heads) * config.k_head_dim
        v_start = 2 * config.k_size + head * config.v_head_dim
        for t, row in enumerate(c):
            q, k = (row[at : at + config.k_head_dim] for at in (k_start, config.k_size + k_start))
            q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
            v = row[v_start : v_start + config.v_head_dim]
            state = g[t, head].exp() * states[head]
            state = state + torch.outer(k, beta[t, head] * (v - state.T @ k))
            states[head], outputs[t, head] = state, state.T @ q / config.k_head_dim**0.5
    return outputs, states
