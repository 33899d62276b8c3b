"""Clauses of the scheduler: KV that becomes NaN by a transient fault does not stay in the cache."""

from __future__ import annotations

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.contracts.scheduler.schedules import harness_for
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness
from diptych.shared.tools.conformance.oracles.schedules import Schedule, random_faults, run_schedule
from diptych.shared.types import FinishError, FinishLength

BEFORE = [5, 7, 11, 13]
NAN_TOKEN = 50
PROMPT = [*BEFORE, 17, NAN_TOKEN, 19, 23, 29, 31, 37, 41]


def expect_error(harness: SchedulerHarness, rid: str) -> None:
    reason = harness.ended.get(rid)
    expect_true("the request whose KV is NaN ends with FinishError", isinstance(reason, FinishError), reason)
    expect_equal("its tokens", harness.tokens[rid], [])


def expect_forgotten(harness: SchedulerHarness, num_cached: int) -> None:
    """Check that the same prompt finds the prefix that was cached before, and gets its right answer."""
    rid = harness.submit(PROMPT, 4)
    harness.run()
    expect_equal("num_cached_tokens", harness.reqs[rid].num_cached_tokens, num_cached)
    harness.expect(rid, 4)
    harness.expect_idle()


@contract(
    "A prompt whose logits are NaN leaves nothing that it computed in the cache, and all that it found.",
    table(
        "page_size chunk disable_radix",
        ("page 1",),
        ("page 4", 4),
        ("in the first of three chunks", 1, 4),
        ("in the last chunk", 1, 8),
        ("page 4, in chunks", 4, 4),
        ("no radix", 1, 4, True),
        page_size=1,
        chunk=None,
        disable_radix=False,
    ),
)
def nan_prompt(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl,
        page_size=case.page_size,
        chunked_prefill_size=case.chunk,
        disable_radix_cache=case.disable_radix,
    )
    harness.submit(BEFORE, 1)
    harness.run()
    harness.model_runner.spoil_token = NAN_TOKEN
    rid = harness.submit(PROMPT, 4)
    harness.run()
    expect_error(harness, rid)
    expect_forgotten(harness, 0 if case.disable_radix else len(BEFORE))


@contract("Nor does one of which only the KV was wanted.", EXAMPLE)
def nan_without_output(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    harness.model_runner.spoil_token = NAN_TOKEN
    rid = harness.submit(PROMPT, 0)
    harness.run()
    expect_equal("its reason", harness.ended[rid], FinishLength(0))
    expect_forgotten(harness, 0)


@contract(
    "Others that begin alike and come at the same time, or right behind it, get their own answers.",
    table(
        "together page_size",
        ("together", True),
        ("behind", False),
        ("together, page 4", True, 4),
        ("behind, page 4", False, 4),
        page_size=1,
    ),
)
def found_by_others(impl: type[Scheduler], case: Case) -> None:
    """`together`: the other requests arrive with the faulty one; otherwise in the step after it."""
    harness = harness_for(impl, page_size=case.page_size)
    harness.submit([*BEFORE, 2, 2], 1)
    harness.run()
    unconcerned = harness.submit([*BEFORE, 2, 2, 3], 9)
    harness.step()
    harness.model_runner.spoil_token = NAN_TOKEN
    nan_rid = harness.submit(PROMPT, 4)
    if not case.together:
        harness.step()
    others = [harness.submit([*PROMPT, *rest], 4) for rest in ([], [2], [2, 2, 2, 2])]
    unlike = harness.submit([*BEFORE, 18, 1, 2], 9)
    harness.run()
    expect_error(harness, nan_rid)
    for rid in others:
        harness.expect(rid, 4)
    for rid in (unconcerned, unlike):
        harness.expect(rid, 9)
        expect_equal("retractions of whom it does not concern", harness.reqs[rid].num_retractions, 0)
    num_whole = (len(PROMPT) - 1) // case.page_size * case.page_size
    expect_forgotten(harness, num_whole)


@contract("The same when the model fails with those who came right behind it.", EXAMPLE)
def fails_after_a_nan_prompt(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, fail_token=60)
    harness.model_runner.spoil_token = NAN_TOKEN
    nan_rid = harness.submit(PROMPT, 4)
    harness.step()
    other = harness.submit([*PROMPT, 60], 4)
    harness.run()
    expect_error(harness, nan_rid)
    expect_error(harness, other)
    expect_forgotten(harness, 0)


@contract(
    "Nor does it live on when the request leaves before it is known.",
    table("is_aborted", ("aborted", True), ("retracted", False)),
)
def leaves_before_it_is_known(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    harness.model_runner.spoil_token = NAN_TOKEN
    rid = harness.submit(PROMPT, 4)
    harness.step()
    if case.is_aborted:
        harness.scheduler.abort(rid)
        harness.run()
        expect_forgotten(harness, 0)
        return
    harness.scheduler.retract(rid)
    harness.run()
    if isinstance(harness.ended[rid], FinishLength):  # it was computed again
        harness.expect(rid, 4)
    else:
        expect_error(harness, rid)
    again = harness.submit(PROMPT, 4)
    harness.run()
    harness.expect(again, 4)
    harness.expect_idle()


@contract(
    "Nor does what a request computes after its end, which is never read.",
    grid("{num_steps} in a launch", num_steps=(1, 2)),
)
def nan_after_the_end(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(BEFORE, 3, VOCAB_SIZE)
    last = tokens[-1]
    assert last not in (*BEFORE, *tokens[:-1])
    harness = harness_for(impl, num_continuous_decode_steps=case.num_steps)
    harness.model_runner.spoil_token = last
    harness.submit(BEFORE, 20, eos=frozenset([last]))
    harness.run()
    harness.model_runner.spoil_token = None
    rid = harness.submit([*BEFORE, *tokens, 2], 4)
    harness.run()
    harness.expect(rid, 4)
    harness.expect_idle()


@contract("What was cached stays right when others take the places of those who leave.", EXAMPLE)
def rows_change_hands(impl: type[Scheduler], case: Case) -> None:
    """A batch in flight may still read their rows."""
    prompts = [[5, 7, 11, 13], [3, 1, 4, 1, 5]]
    harness = harness_for(impl, max_running_requests=2)
    texts = []
    for prompt in prompts:
        tokens = expected_tokens(prompt, 4, VOCAB_SIZE)
        texts.append([*prompt, *tokens])
        harness.submit(prompt, 20, eos=frozenset(tokens[3:]))
    for token in (8, 9):
        harness.submit([token] * 14, 3)
    harness.run()
    aborted = [harness.submit([token] * 9, 20) for token in (6, 2)]
    harness.step()
    for rid in aborted:
        harness.scheduler.abort(rid)
    for token in (18, 19):
        harness.submit([token] * 14, 3)
    harness.run()
    for text in (*texts, [6] * 9, [2] * 9):
        rid = harness.submit([*text, 2], 3)
        harness.run()
        harness.expect(rid, 3)
    harness.expect_idle()


@contract(
    "Under any schedule a fault ends one request at most, and is forgotten.",
    tuple(random_faults(seed) for seed in range(16)),
)
def any_faults(impl: type[Scheduler], case: Schedule) -> None:
    run_schedule(case, {"scheduler": impl})
