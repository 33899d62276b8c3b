"""Clauses of attention, fourth part: planning a step, and KV that a step reads from earlier steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.inputs import Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import poison_, poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.attention.batches import DECODE, EXTEND, MIXED
from diptych.shared.tools.conformance.oracles.attention_batches import (
    LAYER_ID,
    AttentionBatch,
    AttentionCase,
    in_types,
    or_refusal,
    run_or_refuse,
)
from diptych.shared.types import ForwardMode

STEPS = tuple(
    replace(case, name=f"{case.name}, page {page_size}", page_size=page_size)
    for batch, page_size in ((DECODE, 4), (EXTEND, 16), (MIXED, 1))
    for case in in_types(batch, torch.float32, torch.bfloat16)
)


@contract(
    "A batch without requests gives no rows.",
    in_types(AttentionCase("idle", ()), torch.float32, torch.bfloat16),
)
def idle(impl: type[AttentionBackend], case: AttentionCase) -> None:
    output = run_or_refuse(impl, case.make())
    if output is not None:
        expect_equal("the output's shape", output.shape, case.make().output_like().shape)


@contract("plan may come before the new tokens' K and V: run reads them.", STEPS)
def planned_before_stored(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    new = batch.forward_batch.out_cache_loc
    k, v = batch.new_kv()
    for buffer in (batch.kv_pool.k_buffer, batch.kv_pool.v_buffer):
        buffer(LAYER_ID)[new] = torch.nan

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        batch.kv_pool.store(LAYER_ID, new, k, v)
        batch.expect(batch.run_planned(backend, plan))

    or_refusal(case, steps)


@contract("k and v, when given, are what the pool holds: they change nothing.", STEPS)
def given_k_and_v(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    k, v = batch.new_kv()

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        batch.expect(batch.run_planned(backend, plan, k=k, v=v), "output with k and v")
        batch.expect(batch.run_planned(backend, plan), "output without")

    or_refusal(case, steps)


@contract("q, k and v may be parts of one merged tensor.", STEPS)
def parts_of_a_merged_tensor(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    k, v = batch.new_kv()
    num_heads = case.num_qo_heads + 2 * case.num_kv_heads
    merged = poisoned((batch.q.shape[0], num_heads, case.head_dim), case.dtype, batch.q.device)
    views = merged.split([case.num_qo_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    for view, part in zip(views, (batch.q, k, v)):
        view.copy_(part)
    batch.q = views[0]

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        batch.expect(batch.run_planned(backend, plan), "output")
        batch.expect(batch.run_planned(backend, plan, k=views[1], v=views[2]), "output with k and v")

    or_refusal(case, steps)


@contract("plan and run change nothing: pools, rows, batch, layer and q stay as they are.", STEPS)
def nothing_changes(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    k, v = batch.new_kv()
    watched: dict[str, torch.Tensor] = {
        name: value for name, value in vars(batch.forward_batch).items() if isinstance(value, torch.Tensor)
    }
    watched |= {"q": batch.q, "k": k, "v": v, "req_to_token": batch.req_to_token_pool.req_to_token}
    watched["k_buffer"] = batch.kv_pool.k_buffer(LAYER_ID)
    watched["v_buffer"] = batch.kv_pool.v_buffer(LAYER_ID)
    before = {name: value.clone() for name, value in watched.items()}

    def expect_unchanged(after: str) -> None:
        for name, value in watched.items():
            same = torch.equal(value.nan_to_num(nan=7919.0), before[name].nan_to_num(nan=7919.0))
            expect_true(f"{name} is unchanged after {after}", same)

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        expect_unchanged("plan")
        first = batch.run_planned(backend, plan, k=k, v=v)
        expect_unchanged("run")
        batch.expect(first, "the first output")
        kept = first.clone()
        batch.q = batch.q.flip(0)
        batch.expect(batch.run_planned(backend, plan, k=k, v=v), "the output of another q")
        expect_equal("the first output afterwards", first, kept)

    or_refusal(case, steps)


@contract("One plan serves all layers, each with its own K and V.", STEPS)
def layers_of_one_plan(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    batch.store_kv(0, Inputs(seed=99))
    plain = batch.layer

    def steps() -> None:
        backend = batch.backend(impl)
        plan = backend.plan(batch.forward_batch)
        for layer_id in (0, 1, 0):
            batch.layer = replace(plain, layer_id=layer_id)
            batch.expect(batch.run_planned(backend, plan), f"output of layer {layer_id}")

    or_refusal(case, steps)


@contract(
    "One plan serves layers of different kinds: with and without a window, a soft-cap.",
    tuple(
        Case(
            f"{case.name}",
            batch=replace(case, sliding_window=3),
            windows=(-1, 3, -1, 30, 3),
            caps=(0.0, 0.0, 1.0, 0.0, 2.0),
        )
        for case in STEPS
    ),
)
def kinds_of_one_plan(impl: type[AttentionBackend], case: Case) -> None:
    assert len(case.windows) == len(case.caps)
    batch = case.batch.make()
    plain = batch.layer

    def planned() -> tuple[AttentionBackend, Any]:
        backend = batch.backend(impl)
        return backend, backend.plan(batch.forward_batch)

    ready = or_refusal(replace(case.batch, sliding_window=-1), planned)
    if ready is None:
        return
    backend, plan = ready
    for window, cap in zip(case.windows, case.caps):
        batch.layer = replace(plain, sliding_window=window, logit_cap=cap)
        asked = replace(case.batch, sliding_window=window, logit_cap=cap)
        output = or_refusal(asked, partial(batch.run_planned, backend, plan))
        if output is not None:
            batch.expect(output, f"output with window {window}, cap {cap:g}")


class Chunks(Case):
    page_size: int = 4
    dtype: torch.dtype = torch.bfloat16

    def check(self) -> None:
        if sum(self.chunks) != self.length or any(chunk < 1 for chunk in self.chunks):
            raise ValueError("chunks of at least one token make up the prompt")


@contract(
    "The chunks of a prompt give what the whole prompt gives, step after step on one backend.",
    tuple(
        Chunks(f"{name} of 64, {type_name(dtype)}", length=64, chunks=chunks, dtype=dtype)
        for name, chunks in (
            ("one chunk", (64,)),
            ("1 and the rest", (1, 63)),
            ("unequal chunks", (13, 13, 13, 25)),
            ("token after token", (1,) * 64),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
)
def chunks_of_a_prompt(impl: type[AttentionBackend], case: Chunks) -> None:
    whole = AttentionCase(case.name, ((0, case.length),), page_size=case.page_size, dtype=case.dtype)
    ends = [sum(case.chunks[: i + 1]) for i in range(len(case.chunks))]
    spans = [[(0, end - chunk, end)] for chunk, end in zip(case.chunks, ends)]
    _expect_spans(impl, AttentionBatch(whole), spans)


@contract("Each plan is of its own batch: smaller, larger and other ones may follow one another.", STEPS)
def plans_follow_one_another(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    whole = [(i, cached, cached + new) for i, (cached, new) in enumerate(case.requests)]
    _expect_spans(impl, batch, [whole, whole[:1], whole[::-1], whole[1:3], whole])


@contract("A backend and the one beside it have plans of two batches at the same time.", STEPS)
def backends_stand_beside_each_other(impl: type[AttentionBackend], case: AttentionCase) -> None:
    """The cut of a prefill pass into two halves: the second one has the last tokens of each request."""
    batch = case.make()
    expected, q = batch.expected(), batch.q
    cuts = [cached + (new + 1) // 2 for cached, new in case.requests]
    halves = [
        [(i, cached, cut) for i, ((cached, _), cut) in enumerate(zip(case.requests, cuts))],
        [
            (i, cut, cached + new)
            for i, ((cached, new), cut) in enumerate(zip(case.requests, cuts))
            if new > 1
        ],
    ]

    def run() -> None:
        first = batch.backend(impl)
        backends = first, first.beside()
        planned = [
            (backend, batch.rows_of(spans), backend.plan(batch.forward_batch_of(spans, ForwardMode.EXTEND)))
            for backend, spans in zip(backends, [half for half in halves if half])
        ]
        for number, (backend, rows, plan) in enumerate(planned):
            batch.q = q[rows]
            output = batch.run_planned(backend, plan)
            expect_close(f"half {number}", output, expected[rows], tolerance("attention", batch.case.dtype))

    or_refusal(batch.case, run)


def _expect_spans(impl: type[AttentionBackend], batch: AttentionBatch, steps: list[list[Any]]) -> None:
    """Run successive steps on one backend, each with some positions of the batch's requests."""
    expected, q = batch.expected(), batch.q

    def run() -> None:
        backend = batch.backend(impl)
        for number, spans in enumerate(steps):
            is_decode = all(end - start == 1 for _, start, end in spans) and spans[0][1] > 0
            mode = ForwardMode.DECODE if is_decode else ForwardMode.EXTEND
            rows = batch.rows_of(spans)
            batch.q = q[rows]
            output = batch.run_planned(backend, backend.plan(batch.forward_batch_of(spans, mode)))
            expect_close(f"step {number}", output, expected[rows], tolerance("attention", batch.case.dtype))

    or_refusal(batch.case, run)


@contract("A NaN in one request's K or V stays with that request.", STEPS)
def nan_stays(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    healthy = run_or_refuse(impl, batch)
    if healthy is None:
        return
    sick = min(2, len(case.requests) - 1)
    span = (sick, case.requests[sick][0], sum(case.requests[sick]))
    for buffer in (batch.kv_pool.k_buffer, batch.kv_pool.v_buffer):
        before = buffer(LAYER_ID)[batch.slots[sick][:1]].clone()
        poison_(buffer(LAYER_ID)[batch.slots[sick][0]])
        output = batch.run(impl)
        is_sick = torch.zeros(len(output), dtype=torch.bool)
        is_sick[batch.rows_of([span])] = True
        expect_true("the sick request's rows are NaN", bool(output.cpu()[is_sick].isnan().all()))
        expect_equal("the others' rows", output.cpu()[~is_sick], healthy.cpu()[~is_sick])
        buffer(LAYER_ID)[batch.slots[sick][:1]] = before


@agreement(
    "The reference gives the same output within the table.",
    tuple(
        replace(
            case, name=f"{case.name}, all extras", sliding_window=9, logit_cap=3.0, sinks=(0.5, -1.0, 3.0)
        )
        for case in STEPS
    )
    + STEPS,
)
def same_output(impl: type[AttentionBackend], case: AttentionCase, reference: type[AttentionBackend]) -> None:
    batch = case.make()
    output = run_or_refuse(impl, batch)
    if output is not None:
        expect_close("output", output, batch.run(reference), tolerance("attention", case.dtype))
