"""Clauses of attention, sixth part: ragged plans for graphs, whose batches change shape between replays."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_raises
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.attention_batches import (
    AttentionBatch,
    AttentionCase,
    Span,
    in_types,
    or_refusal,
)
from diptych.shared.types import ForwardBatch, ForwardMode

EXTEND = AttentionCase("prompts", ((17, 3), (0, 21), (5, 1), (130, 40), (0, 2)))
DECODE = AttentionCase("decoding", ((17, 1), (70, 1), (5, 1), (300, 1), (0, 1)))
CASES = tuple(
    case
    for batch in (EXTEND, DECODE)
    for kind in (
        batch,
        replace(batch, name=f"{batch.name}, pages of 16", page_size=16),
        replace(batch, name=f"{batch.name}, window", sliding_window=6),
        replace(batch, name=f"{batch.name}, cap and sinks", logit_cap=2.0, sinks=(0.5, -1.0)),
    )
    for case in in_types(kind, torch.float32, torch.bfloat16)
)
PADDING_ROWS = 6
"""Padding rows of the step, and for prompts as many padding requests."""
FRONT = 2
"""As many of these rows are the first."""


class Buffers:
    """Fixed buffers of a step, for more tokens and more requests than the case has."""

    def __init__(self, batch: AttentionBatch) -> None:
        num_tokens, *heads = batch.q.shape
        self.is_decode = batch.case.forward_mode.is_decode
        self.size = num_tokens + PADDING_ROWS
        self.num_reqs = self.size if self.is_decode else len(batch.case.requests) + PADDING_ROWS
        self.q = batch.q.new_full((self.size, *heads), torch.nan)
        self.out = batch.output_like(self.size)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=batch.q.device)

        lens = (1,) * self.size if self.is_decode else (self.size, *[0] * (self.num_reqs - 1))
        ones = zeros(self.num_reqs) + 1
        self.step = ForwardBatch(
            forward_mode=ForwardMode.DECODE if self.is_decode else ForwardMode.EXTEND,
            input_ids=zeros(self.size),
            positions=zeros(self.size),
            req_pool_indices=zeros(self.num_reqs),
            seq_lens=zeros(self.num_reqs),
            out_cache_loc=zeros(self.size),
            extend_seq_lens=ones if self.is_decode else zeros(self.num_reqs),
            extend_start_loc=ones.cumsum(0) - 1 if self.is_decode else zeros(self.num_reqs),
            seq_lens_cpu=lens,
            extend_seq_lens_cpu=lens,
        )

    def load(self, q: torch.Tensor, batch: ForwardBatch) -> slice:
        """Fill the buffers and return the live rows."""
        step, n = self.step, batch.batch_size
        rows = slice(FRONT, FRONT + len(q))
        first = FRONT if self.is_decode else 0
        lens = ("req_pool_indices", "seq_lens") + (() if self.is_decode else ("extend_seq_lens",))
        for name in lens:
            getattr(step, name).zero_()[first : first + n] = getattr(batch, name)
        if not self.is_decode:
            step.extend_start_loc[:n] = batch.extend_start_loc + FRONT
        self.q.fill_(torch.nan)[rows] = q
        self.out.fill_(7.0)[rows] = torch.nan
        return rows


@contract(
    "A ragged plan serves any batch that fits into its buffers, from the buffers alone; padding rows of out "
    "are not written. A backend without ragged plans raises.",
    CASES,
)
def ragged(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    expected, buffers = batch.expected(), Buffers(batch)
    whole: list[Span] = [(i, cached, cached + new) for i, (cached, new) in enumerate(case.requests)]

    def steps() -> None:
        backend = batch.backend(impl)
        if not backend.supports_ragged_graphs:
            expect_raises("a ragged plan", ValueError, backend.plan_ragged, buffers.step)
            return
        plan = backend.plan_ragged(buffers.step)
        for number, spans in enumerate([whole, whole[3:], whole[::-1], [], whole[:1], whole]):
            wanted = batch.rows_of(spans)
            rows = buffers.load(batch.q[wanted], batch.forward_batch_of(spans, buffers.step.forward_mode))
            output = backend.run(buffers.q, batch.layer, plan, out=buffers.out)
            close = tolerance("attention", case.dtype)
            expect_close(f"step {number}", output[rows], expected[wanted], close)
            others = torch.cat([output[:FRONT], output[rows.stop :]])
            expect_equal(f"step {number}: padding rows", others, torch.full_like(others, 7.0))

    or_refusal(case, steps)
