"""Clauses of attention, fifth part: where the output goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.clauses.poison import poisoned
from diptych.shared.tools.conformance.contracts.attention.batches import DECODE, EXTEND, MIXED, PROMPT
from diptych.shared.tools.conformance.oracles.attention_batches import (
    AttentionBatch,
    AttentionCase,
    in_types,
    or_refusal,
)

BATCHES = (
    DECODE,
    EXTEND,
    MIXED,
    AttentionCase("one long prompt", ((0, 150),)),
    AttentionCase("long prompts and decoding", ((5, 90), (0, 70), (40, 1), (3, 1))),
    AttentionCase("one request far longer", ((259, 1), (3, 1))),
    AttentionCase("trees", ((17, 5), (3, 5)), mask="tree", tail=5),
)
RARER = (
    AttentionCase("idle", ()),
    replace(PROMPT, name="sinks", sinks=(0.5, -1.0)),
    AttentionCase("long prompt, sinks", ((3, 70),), sinks=(0.5, -1.0)),
    replace(EXTEND, name="window", sliding_window=5),
    AttentionCase("flat mask", ((17, 5), (3, 2)), mask="tree"),
    AttentionCase("blind tokens", ((13, 4), (2, 3)), mask="blind"),
    AttentionCase("head_dim 80", ((13, 4), (2, 1)), head_dim=80, num_qo_heads=6),
)
MARGIN = 3
"""Rows of another tensor before and after those of the output."""


def amid_others(batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """A larger tensor of 7s, and the rows for the output in it, filled with NaN."""
    num_tokens = batch.q.shape[0]
    whole = batch.output_like(num_tokens + 2 * MARGIN).fill_(7.0)
    return whole, whole[MARGIN : MARGIN + num_tokens].fill_(torch.nan)


def expect_others(whole: torch.Tensor, num_tokens: int) -> None:
    others = torch.cat([whole[:MARGIN], whole[MARGIN + num_tokens :]])
    expect_equal("the rows before and after out", others, torch.full_like(others, 7.0))


@contract(
    "out is written and returned, whatever it held; the rows around it stay as they are.",
    tuple(case for batch in BATCHES for case in in_types(batch, torch.float32, torch.bfloat16))
    + tuple(case for batch in RARER for case in in_types(batch, torch.bfloat16)),
)
def output_given(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    whole, out = amid_others(batch)
    k, v = batch.new_kv()

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        for what, given in (("out", {}), ("out, again, with k and v", {"k": k, "v": v})):
            output = batch.run_planned(backend, plan, out=out, **given)
            expect_true(f"what is returned is {what}", output is out)
            batch.expect(out, what)
            expect_others(whole, out.shape[0])

    or_refusal(case, steps)


@contract(
    "Where out is given only now and then, the other outputs are tensors of their own.",
    in_types(DECODE, torch.float32, torch.bfloat16) + in_types(MIXED, torch.float32, torch.bfloat16),
)
def outputs_in_turn(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    out, q = poisoned(batch.output_like().shape, case.dtype, batch.q.device), batch.q

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        first = batch.run_planned(backend, plan)
        kept = first.clone()
        batch.q = q.flip(0)
        batch.run_planned(backend, plan, out=out)
        batch.expect(out, "out")
        expect_equal("the output before out was given", first, kept)
        given = out.clone()
        batch.q = q
        batch.expect(batch.run_planned(backend, plan), "the output without out")
        expect_equal("out afterwards", out, given)

    or_refusal(case, steps)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row too many": lambda q: q.new_zeros(q.shape[0] + 1, *q.shape[1:]),
    "a row too few": lambda q: q.new_zeros(q.shape[0] - 1, *q.shape[1:]),
    "heads joined": lambda q: q.new_zeros(q.shape[0], q.shape[1] * q.shape[2]),
    "another dtype": lambda q: torch.zeros_like(q, dtype=torch.float16),
    "a wider dtype": lambda q: torch.zeros_like(q, dtype=torch.float32),
    "another device": lambda q: torch.empty_like(q, device="meta"),
    "every second row": lambda q: q.new_zeros(2 * q.shape[0], *q.shape[1:])[::2],
    "some of the heads": lambda q: q.new_zeros(q.shape[0], q.shape[1] + 2, q.shape[2])[:, 1:-1],
    "heads before rows": lambda q: q.new_zeros(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1),
}
"""What is no place for the output of q."""


@contract(
    "out of another shape, dtype or device, or not contiguous, is a ValueError.",
    tuple(
        Case(f"{wrong}, {batch.name}", wrong=wrong, batch=replace(batch, dtype=torch.bfloat16))
        for wrong in WRONG
        for batch in (DECODE, EXTEND, MIXED)
    ),
)
def wrong_output(impl: type[AttentionBackend], case: Case) -> None:
    assert not case.batch.unusual  # refused cases are left out
    batch = case.batch.make()
    backend = batch.backend(impl)
    plan = backend.plan(batch.forward_batch)
    out = WRONG[case.wrong](batch.q)
    expect_raises(case.name, ValueError, partial(batch.run_planned, backend, plan, out=out))
