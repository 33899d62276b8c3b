"""Clauses of the scheduler: invalid requests, clamped lengths, a full queue, and timeouts."""

from __future__ import annotations

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.contracts.scheduler.schedules import PROMPT, harness_for
from diptych.shared.types import FinishAbort, FinishLength


@contract(
    "add_request refuses bad requests with ValueError; it takes nothing and affects no other request.",
    table(
        "prompt params",
        ("empty prompt", ()),
        ("id above the vocabulary", (1, 61)),
        ("negative id", (-1,)),
        ("prompt as long as the context", (1,) * 32),
        ("prompt longer than the pool", (1,) * 30),
        ("stop token outside the vocabulary", (1,), {"stop_token_ids": (99,)}),
        ("bias outside the vocabulary", (1,), {"logit_bias": {61: 1.0}}),
        params={},
    ),
)
def refused(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, context_len=32, pool_tokens=28)
    rid = harness.submit(PROMPT, 6)
    harness.step()
    expect_raises("add_request", ValueError, lambda: harness.submit(case.prompt, 5, **case.params))
    harness.run()
    harness.expect(rid, 6)
    harness.expect_idle()


@contract("A rid in use is refused; the request that has it goes on.", EXAMPLE)
def rid_in_use(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    rid = harness.submit(PROMPT, 6)
    harness.step()
    expect_raises("add_request", ValueError, lambda: harness.submit([1], rid=rid))
    harness.run()
    expect_equal("its length", len(harness.tokens[rid]), 6)


@contract("The rid of an aborted request is in use until its end was reported.", EXAMPLE)
def rid_in_use_until_reported(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    rid = harness.submit(PROMPT, 6)
    harness.step()
    harness.scheduler.abort(rid)
    expect_raises("add_request", ValueError, lambda: harness.submit([1], rid=rid))
    (last,) = [output for output in harness.step() if output.finished_reason is not None]
    expect_equal("the end", (last.rid, isinstance(last.finished_reason, FinishAbort)), (rid, True))
    del harness.ended[rid]
    harness.submit([1], 3, rid=rid)
    harness.run()
    harness.expect(rid, 3)
    harness.expect_idle()


@contract(
    "max_new_tokens is clamped: prompt + output fits the context, all but the last token fits the pool.",
    table(
        "num_prompt max_new_tokens expected page_size context_len pool_tokens",
        ("prompt of the context less one", 31, 10, 1),
        ("to the context", 20, 100, 12),
        ("exactly the context", 20, 12, 12),
        ("prompt of the whole pool", 32, 10, 1, 1, 128, 32),
        ("prompt of the whole pool, pages of 16", 32, 10, 1, 16, 128, 32),
        ("to the pool", 20, 100, 13, 4, 128, 32),
        ("nothing asked for", 5, 0, 0),
        page_size=1,
        context_len=32,
        pool_tokens=256,
    ),
)
def clamped(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl, context_len=case.context_len, pool_tokens=case.pool_tokens, page_size=case.page_size
    )
    rid = harness.submit(list(range(case.num_prompt)), case.max_new_tokens)
    harness.run()
    harness.expect(rid, case.expected)
    expect_equal("its reason", harness.ended[rid], FinishLength(case.expected))
    harness.expect_idle()


@contract("A full queue turns the newcomer away with status 503.", EXAMPLE)
def full_queue(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, max_running_requests=1, max_queued_requests=2)
    rids = [harness.submit([i + 1], 4) for i in range(2)]
    late = harness.submit([9], 4)
    harness.run()
    _expect_503(harness.ended[late])
    for rid in rids:
        expect_equal(f"{rid}'s reason", harness.ended[rid], FinishLength(4))


@contract("With priorities, a full queue turns a strictly less important request away instead.", EXAMPLE)
def full_queue_with_priorities(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, max_queued_requests=2, enable_priority_scheduling=True)
    low, high = harness.submit([1], 4, priority=1), harness.submit([2], 4, priority=5)
    newcomer = harness.submit([3], 4, priority=3)
    equal = harness.submit([4], 4, priority=3)
    harness.run()
    _expect_503(harness.ended[low])
    _expect_503(harness.ended[equal])
    expect_equal("the most important", harness.ended[high], FinishLength(4))
    expect_equal("the newcomer", harness.ended[newcomer], FinishLength(4))


@contract("A request that waits longer than waiting_timeout ends with status 503.", EXAMPLE)
def waiting_timeout(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, max_running_requests=1, waiting_timeout=10.0)
    first, second = harness.submit([1], 50), harness.submit([2], 5)
    harness.step()
    harness.clock.now = 9.5
    harness.step()
    expect_true("not before its time", second not in harness.ended)
    harness.clock.now = 10.5
    harness.step()
    _expect_503(harness.ended[second])
    harness.run()
    harness.expect(first, 50)


@contract("A request that runs longer than running_timeout ends with status 503.", EXAMPLE)
def running_timeout(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, running_timeout=10.0)
    rid = harness.submit([1], 50)
    harness.step()
    harness.clock.now = 10.5
    harness.run()
    _expect_503(harness.ended[rid])
    harness.expect_idle()


def _expect_503(reason: object) -> None:
    expect_true("it ends with status 503", isinstance(reason, FinishAbort) and reason.status == 503, reason)
