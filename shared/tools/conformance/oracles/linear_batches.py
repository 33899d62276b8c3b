"""Batches of linear attention, and the recurrence in float64, one request and one head at a time."""

from __future__ import annotations

from collections.abc import Iterable
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
    """`steps`: for each step, the new tokens of each request; 0: the request is not in the batch. `verify`:
    the steps that have behind them drafts, `num_nodes` tokens in all, which the next step rejects."""

    steps: tuple[tuple[int, ...], ...] = ((5,),)
    num_k_heads: int = 2
    num_v_heads: int = 4
    k_head_dim: int = 16
    v_head_dim: int = 16
    conv_kernel: int = 4
    dtype: torch.dtype = torch.float32
    decay: float = 1.0  # scale of g
    channel_decay: bool = False
    verify: tuple[int, ...] = ()
    num_nodes: int = 4
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
        if any(max(self.steps[step]) > self.num_nodes for step in self.verify):
            raise ValueError("at most num_nodes tokens of a verify step stay")

    @property
    def config(self) -> LinearAttentionConfig:
        heads = self.num_k_heads, self.num_v_heads, self.k_head_dim, self.v_head_dim
        return LinearAttentionConfig(*heads, self.conv_kernel, self.channel_decay)


@dataclass(frozen=True)
class Sequence:
    """All tokens of a request. u [n, num_channels]; g [n, num_v_heads], with `channel_decay` also
    [.., k_head_dim], and beta [n, num_v_heads] float32."""

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
        lens, is_verify = self.case.steps[step], step in self.case.verify
        before = [sum(earlier[i] for earlier in self.case.steps[:step]) for i in range(len(lens))]
        reqs = [i for i, num_new in enumerate(lens) if num_new > 0]
        inputs: tuple[list[torch.Tensor], ...] = ([], [], [])
        spans = []
        for i in reqs:
            tokens, start, end = self.sequences[i], before[i], before[i] + lens[i]
            num_drafts = self.case.num_nodes - lens[i] if is_verify else 0
            drafts = -tokens.u[:1], tokens.g[:1], tokens.beta[:1]
            for found, tensor, draft in zip(inputs, (tokens.u, tokens.g, tokens.beta), drafts):
                found += [tensor[start:end], draft.expand(num_drafts, *draft.shape[1:])]
            spans.append((start, end + num_drafts))
        batch = forward_batch([self.rows[i] for i in reqs], spans, is_verify)
        return reqs, [torch.cat(found) for found in inputs], batch

    def step(self, impl: LinearAttention, step: int) -> dict[int, torch.Tensor]:
        """Run one step; the output of each request in it, without those of drafts."""
        reqs, inputs, batch = self.inputs_of(step)
        output = run_poisoned(impl.run, *map(amid_poison, inputs), self.layer, impl.plan(batch))
        return self.outputs_of(step, reqs, output.split(list(batch.extend_seq_lens_cpu)))

    def outputs_of(
        self, step: int, reqs: list[int], outputs: Iterable[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        return {i: output[: self.case.steps[step][i]] for i, output in zip(reqs, outputs)}

    def padding(self, step: int, size: int) -> ForwardBatch:
        """A batch of the form of a step, of `size` padding requests."""
        is_verify = step in self.case.verify
        num_tokens = self.case.num_nodes if is_verify else 1
        return forward_batch([0] * size, [(0, num_tokens)] * size, is_verify)

    def padded_step(self, impl: LinearAttention, step: int, plan: Any, size: int) -> dict[int, torch.Tensor]:
        """Run a decode or verify step with a plan for graphs of `size` requests; the tokens of padding are
        NaN."""
        reqs, inputs, batch = self.inputs_of(step)
        impl.replan(plan, batch)
        num_each = batch.extend_seq_lens_cpu[0]
        num_padding = num_each * (size - len(reqs))
        nan = [torch.full_like(x[:1], torch.nan).expand(num_padding, *x.shape[1:]) for x in inputs]
        u, g, beta = (amid_poison(torch.cat(pair)) for pair in zip(inputs, nan))
        return self.outputs_of(step, reqs, impl.run(u, g, beta, self.layer, plan).split(num_each))


def forward_batch(rows: list[int], spans: list[tuple[int, int]], is_verify: bool = False) -> ForwardBatch:
    """Only what linear attention reads is meaningful: `spans`: positions [start, end) of new tokens."""
    lens = [end - start for start, end in spans]
    device = check_device()
    num_tokens = sum(lens)
    several = ForwardMode.MIXED if 1 in lens else ForwardMode.EXTEND
    mode = ForwardMode.DECODE if max(lens) == 1 else several
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if is_verify else mode,
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
    num_nodes = case.num_nodes if case.verify else 0
    sizes = len(totals) + 2, NUM_LAYERS, config, case.dtype, check_device(), NUM_CHECKPOINTS, num_nodes
    pool = StatePool(*sizes)
    for buffer in (pool.inputs, pool.recurrent, pool.held_inputs, pool.held_gates):
        poison_(buffer)
    pool.num_seen.fill_(-2)  # as an earlier request may leave it
    weight = inputs.normal(config.num_channels, config.conv_kernel, dtype=case.dtype, std=0.5)
    decays = (config.num_v_heads, config.k_head_dim)[: 1 + case.channel_decay]
    sequences = [
        Sequence(
            inputs.normal(num_tokens, config.num_channels, dtype=case.dtype),
            -case.decay * inputs.uniform(num_tokens, *decays),
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
            state = g[t, head].exp().view(-1, 1) * states[head]
            state = state + torch.outer(k, beta[t, head] * (v - state.T @ k))
            states[head], outputs[t, head] = state, state.T @ q / config.k_head_dim**0.5
    return outputs, states
