"""Clauses of attention, seventh part: backends whose rows do not depend on each other."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionCase, in_types
from diptych.shared.types import ForwardMode

REQUESTS = AttentionCase("requests of every length", ((1100, 3), (0, 40), (511, 1), (0, 1), (300, 70)))
CASES = tuple(
    case
    for kind in (
        REQUESTS,
        replace(
            REQUESTS,
            name="window, cap and sinks",
            page_size=16,
            sliding_window=130,
            logit_cap=5.0,
            sinks=(0.5,),
        ),
    )
    for case in in_types(kind, torch.float32, torch.bfloat16)
)


@contract(
    "A deterministic backend gives a token the same bits in a prefill with others, in any chunk of its "
    "prompt, and as a decode step, alone and beside others.",
    CASES,
)
def independent_rows(impl: type[AttentionBackend], case: AttentionCase) -> None:
    if not impl.is_deterministic:
        return
    batch = case.make()
    whole = batch.run(impl)
    batch.expect(whole)
    backend = batch.backend(impl)
    last_tokens = [(i, n - 1, n) for i, n in enumerate(case.seq_lens)]
    steps = [
        ("the last tokens", last_tokens, ForwardMode.DECODE),
        *((f"request {span[0]} alone", [span], ForwardMode.DECODE) for span in last_tokens),
        *((f"a chunk of {n}", [(4, 300, 300 + n)], ForwardMode.EXTEND) for n in (1, 17, 64)),
    ]
    for what, spans, mode in steps:
        rows = batch.rows_of(spans)
        plan = backend.plan(batch.forward_batch_of(spans, mode))
        expect_equal(what, backend.run(batch.q[rows], batch.layer, plan), whole[rows])
