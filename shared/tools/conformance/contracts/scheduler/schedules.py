"""Clauses of the scheduler: every request gets its right tokens under any schedule."""

from __future__ import annotations

from typing import Any

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness
from diptych.shared.tools.conformance.oracles.schedules import Schedule, random_schedule, run_schedule
from diptych.shared.types import FinishAbort, FinishError, FinishLength, FinishToken

PROMPT = [5, 7, 11, 13, 17, 19, 23]
NUM_RANDOM_SCHEDULES = 40


SETTINGS = table(
    "page_size chunk mixed disable_radix",
    *(
        (page_size, *rest)
        for page_size in (1, 4, 16)
        for rest in ((None, False, False), (16, False, True), (23, True, False), (16, True, True))
    ),
    name=lambda page_size, chunk, mixed, disable_radix: (
        f"page {page_size}, chunk {chunk}{', mixed' * mixed}{', no radix' * disable_radix}"
    ),
)


def harness_for(impl: type[Scheduler], **options: Any) -> SchedulerHarness:
    return SchedulerHarness(replace={"scheduler": impl}, **options)


@contract("A request gets its own tokens, ends once, and then owns nothing.", EXAMPLE)
def one_request(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    rid = harness.submit(PROMPT, 10)
    harness.run()
    harness.expect(rid, 10)
    expect_equal("its reason", harness.ended[rid], FinishLength(10))
    harness.expect_idle()


@contract(
    "A step reports the tokens of its batch; with `overlaps`, those of the batch launched before it.",
    EXAMPLE,
)
def tokens_of_a_step(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    harness.submit(PROMPT, 10)
    for num_steps in range(1, 10):
        harness.step()
        num_launched = harness.scheduler.stats().num_steps
        expect_equal(f"batches launched in {num_steps} steps", num_launched, num_steps)
        num_reported = num_steps - impl.overlaps
        expect_equal(f"tokens reported after {num_steps} steps", len(harness.tokens["r0"]), num_reported)


@contract("Many requests get theirs in every configuration.", SETTINGS)
def many_requests(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl,
        page_size=case.page_size,
        chunked_prefill_size=case.chunk,
        enable_mixed_chunk=case.mixed,
        disable_radix_cache=case.disable_radix,
    )
    rids = [harness.submit([3, 1, 4, 1, 5][: i % 5 + 1] * (1 + i % 4) + [i], 5 + i) for i in range(12)]
    harness.run()
    for i, rid in enumerate(rids):
        harness.expect(rid, 5 + i)
    harness.expect_idle()


@contract(
    "Under any schedule of arrivals, aborts and retractions, with the invariants after every step.",
    tuple(random_schedule(seed) for seed in range(NUM_RANDOM_SCHEDULES)),
)
def any_schedule(impl: type[Scheduler], case: Schedule) -> None:
    run_schedule(case, {"scheduler": impl})


@contract("A second request finds the first one's prefix, and computes only the rest.", EXAMPLE)
def prefix_is_found(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    harness.submit(PROMPT, 4)
    harness.run()
    num_computed = harness.model_runner.num_computed_tokens
    rid = harness.submit([*PROMPT, 1, 2], 1)
    harness.run()
    expect_equal("num_cached_tokens", harness.reqs[rid].num_cached_tokens, len(PROMPT))
    expect_equal("tokens computed", harness.model_runner.num_computed_tokens - num_computed, 2)
    harness.expect(rid, 1)


@contract(
    "A fully cached prompt computes its last token again (lengths page * k and one beside).",
    grid("page {page_size}, {length} tokens", page_size=(1, 4), length=(4, 7, 8, 9, 15, 16, 17)),
)
def full_hit(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, page_size=case.page_size)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(case.length)]
    for _ in range(3):
        rid = harness.submit(prompt, 3)
        harness.run()
        harness.expect(rid, 3)
    num_cached = (case.length - 1) // case.page_size * case.page_size
    expect_equal("num_cached_tokens", harness.reqs[rid].num_cached_tokens, num_cached)
    harness.expect_idle()


@contract("Namespaces (extra_key) share nothing.", EXAMPLE)
def namespaces(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    harness.submit(PROMPT, 2, extra_key="a")
    harness.run()
    other = harness.submit(PROMPT, 2, extra_key="b")
    same = harness.submit(PROMPT, 2, extra_key="a")
    harness.run()
    expect_equal("another namespace's hit", harness.reqs[other].num_cached_tokens, 0)
    expect_equal("its own hit", harness.reqs[same].num_cached_tokens, len(PROMPT) - 1)


@contract(
    "When memory is short, requests are retracted, and all of them end right.",
    table(
        "page_size pool_tokens num_reqs num_prompt max_new_tokens",
        ("eight of 28 tokens in 64 slots", 1, 64, 8, 3, 25),
        ("pages of 4 run out, not tokens", 4, 16, 4, 3, 3),
        ("pages of 16 run out", 16, 64, 4, 14, 10),
    ),
)
def shortage_retracts(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl, pool_tokens=case.pool_tokens, page_size=case.page_size, schedule_conservativeness=0.01
    )
    rids = [
        harness.submit(list(range(i, i + case.num_prompt)), case.max_new_tokens) for i in range(case.num_reqs)
    ]
    harness.run()
    expect_true("a request was retracted", harness.scheduler.stats().num_retractions > 0)
    for rid in rids:
        harness.expect(rid, case.max_new_tokens)
    harness.expect_idle()


@contract("A partly computed prompt is retracted before the last running request.", EXAMPLE)
def chunked_gives_way(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, pool_tokens=48, chunked_prefill_size=8, schedule_conservativeness=0.01)
    first = harness.submit([1, 2, 3], 40)
    harness.step()
    second = harness.submit(list(range(1, 41)), 5)
    harness.run()
    harness.expect(first, 40)
    harness.expect(second, 5)
    harness.expect_idle()


@contract("A request may end with its first token, its last chunk, and in a mixed batch.", EXAMPLE)
def ends_at_once(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, chunked_prefill_size=8, enable_mixed_chunk=True)
    background = harness.submit([9, 9], 30)
    harness.step()
    rids = [harness.submit(list(range(1, 20)), 1), harness.submit([4], 1)]
    harness.run()
    for rid in rids:
        harness.expect(rid, 1)
    harness.expect(background, 30)
    harness.expect_idle()


@contract("A stop token ends a request and is its last id.", EXAMPLE)
def stop_token(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(PROMPT, 10, VOCAB_SIZE)
    harness = harness_for(impl)
    rid = harness.submit(PROMPT, 10, eos=frozenset([tokens[4]]))
    harness.run()
    harness.expect(rid, tokens.index(tokens[4]) + 1)
    expect_equal("its reason", harness.ended[rid], FinishToken(tokens[4]))


@contract("A row of NaN ends its own request, with FinishError, and no other.", EXAMPLE)
def nan_row(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(PROMPT, 5, VOCAB_SIZE)
    others = [[1, 2], [3, 4, 5]]
    assert all(tokens[2] not in expected_tokens(prompt, 5, VOCAB_SIZE) for prompt in others)
    harness = harness_for(impl, nan_token=tokens[2])
    rid = harness.submit(PROMPT, 5)
    rids = [harness.submit(prompt, 5) for prompt in others]
    harness.run()
    expect_true("it ends with FinishError", isinstance(harness.ended[rid], FinishError), harness.ended[rid])
    expect_equal("its tokens", harness.tokens[rid], tokens[:3])
    for other in rids:
        harness.expect(other, 5)
    harness.expect_idle()


@contract("An exception from the model ends its batch with FinishError and leaves the others alone.", EXAMPLE)
def failing_forward(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, fail_token=60, max_running_requests=2)
    bad = harness.submit([1, 60], 5)
    mate = harness.submit([1, 2], 5)
    later = harness.submit([3, 4], 5)
    harness.run()
    for rid in (bad, mate):
        expect_true(
            f"{rid} ends with FinishError", isinstance(harness.ended[rid], FinishError), harness.ended[rid]
        )
    harness.expect(later, 5)
    harness.expect_idle()


@contract(
    "A prefix that several new requests share is computed once, under every policy; no other request waits.",
    table(
        "policy chunked_prefill_size",
        *((policy, policy, None) for policy in ("fcfs", "lpm", "dfs-weight", "random")),
        ("fcfs, in chunks", "fcfs", 24),
    ),
)
def in_batch_prefix(impl: type[Scheduler], case: Case) -> None:
    prefix = [(i * 3) % 50 + 1 for i in range(40)]
    chunk = case.chunked_prefill_size
    harness = harness_for(
        impl,
        schedule_policy=case.policy,
        chunked_prefill_size=chunk,
        in_batch_prefix_deprioritize_threshold=8,
    )
    rids = [harness.submit([*prefix, i], 3) for i in range(6)]
    rids.append(harness.submit([59, *prefix], 3))
    if chunk is None:
        harness.step()
        alone = [rid for rid in rids if harness.reqs[rid].req_pool_idx is not None]
        expect_equal("who is computed first", (len(alone), rids[-1] in alone), (2, True))
    harness.run()
    for rid in rids:
        harness.expect(rid, 3)
    expect_equal("cached tokens", harness.scheduler.stats().num_cached_tokens, 5 * len(prefix))


@contract(
    "A request more important by more than the threshold takes a running one's memory, or its row.",
    table(
        "pool_tokens max_running_requests priority preempts",
        ("memory", 40, 16, 20, True),
        ("a row", 256, 1, 20, True),
        ("by ten: not enough", 40, 16, 10, False),
        ("by eleven", 40, 16, 11, True),
    ),
)
def preemption(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl,
        pool_tokens=case.pool_tokens,
        max_running_requests=case.max_running_requests,
        enable_priority_scheduling=True,
    )
    low = harness.submit([1, 2, 3], 30)
    for _ in range(5):
        harness.step()
    high = harness.submit([4, 5, 6], 30, priority=case.priority)
    harness.step()
    expect_equal("retractions of the lesser one", harness.reqs[low].num_retractions, int(case.preempts))
    harness.run()
    harness.expect(low, 30)
    harness.expect(high, 30)
    harness.expect_idle()


@contract("It does so while less important requests wait for memory, too.", EXAMPLE)
def preemption_with_a_full_pool(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, pool_tokens=40, enable_priority_scheduling=True)
    low = [harness.submit([1, 2, i], 30) for i in range(3)]
    for _ in range(4):
        harness.step()
    high = harness.submit([4, 5, 6], 5, priority=20)
    harness.step()
    expect_true("it is computed in the next step", harness.reqs[high].req_pool_idx is not None)
    harness.run()
    for rid in low:
        harness.expect(rid, 30)
    harness.expect(high, 5)
    harness.expect_idle()


@contract("After a retraction more memory is reserved for each running request, for some steps.", EXAMPLE)
def reserves_more_after_a_retraction(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, pool_tokens=40, schedule_conservativeness=0.1)
    rids = [harness.submit([1, 2, i], 30) for i in range(4)]
    ratios = []
    while harness.scheduler.has_work():
        before = harness.scheduler.stats()
        harness.step()
        after = harness.scheduler.stats()
        is_retracted = after.num_retractions > before.num_retractions
        if harness.scheduler.has_work():
            ratios.append((is_retracted, after.new_token_ratio > before.new_token_ratio))
    expect_true("some request was retracted", any(is_retracted for is_retracted, _ in ratios))
    for is_retracted, has_risen in ratios:
        expect_equal("the ratio rises, and only then", has_risen, is_retracted)
    for rid in rids:
        harness.expect(rid, 30)


@contract("Without live requests the memory that is reserved for a running one is as at the start.", EXAMPLE)
def reserves_as_at_the_start_when_idle(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    at_start = harness.scheduler.stats().new_token_ratio
    rid = harness.submit([1, 2, 3], 30)
    for _ in range(6):
        harness.step()
    expect_true("it falls while a request runs", harness.scheduler.stats().new_token_ratio < at_start)
    harness.scheduler.abort(rid)
    harness.run()
    expect_equal("the ratio of an idle scheduler", harness.scheduler.stats().new_token_ratio, at_start)


@contract(
    "abort ends a request in any state: one terminal message, no token more, all memory back.",
    table(
        "steps_before retract_first chunk max_running_requests",
        ("before the first step", 0),
        ("waiting", 2, False, None, 1),
        ("mid-chunk", 2, False, 4),
        ("running", 3),
        ("retracted", 3, True),
        retract_first=False,
        chunk=None,
        max_running_requests=16,
    ),
)
def abort_in_any_state(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl, chunked_prefill_size=case.chunk, max_running_requests=case.max_running_requests
    )
    other = harness.submit([1], 6)
    rid = harness.submit(list(range(20)), 20)
    for _ in range(case.steps_before):
        harness.step()
    if case.retract_first:
        expect_true("retract finds it", harness.scheduler.retract(rid))
    num_before = len(harness.tokens[rid])
    expect_true("abort finds it", harness.scheduler.abort(rid))
    expect_true("abort does not find it again", not harness.scheduler.abort(rid))
    harness.step()
    reason = harness.ended.get(rid)
    expect_true("it ends with FinishAbort in the next output", isinstance(reason, FinishAbort), reason)
    expect_equal("tokens after the abort", len(harness.tokens[rid]), num_before)
    harness.run()
    harness.expect(other, 6)
    harness.expect_idle()


@contract("abort matches request ids exactly.", EXAMPLE)
def abort_exact_id(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    harness.submit(PROMPT, 5, rid="req-1")
    harness.submit(PROMPT, 5, rid="req-10")
    expect_true("no request is called req", not harness.scheduler.abort("req"))
    expect_true("req-1 is found", harness.scheduler.abort("req-1"))
    harness.run()
    expect_equal("req-10's reason", harness.ended["req-10"], FinishLength(5))
