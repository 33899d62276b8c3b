"""Clauses of the scheduler: drafters that run ahead of the CPU, and sampling at nodes under a grammar.

A scheduler need not run ahead: the answers are the same.
"""

from __future__ import annotations

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.contracts.scheduler import speculation
from diptych.shared.tools.conformance.oracles.answer_alone import EveryThird
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.ledger_drafter import erratic, perfect
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE
from diptych.shared.tools.conformance.oracles.schedules import Schedule, random_speculation, run_schedule
from diptych.shared.tools.conformance.oracles.speculative_harness import (
    CHAIN,
    PROMPT,
    TREE,
    harness_for,
    shape_of,
)
from diptych.shared.types import FinishToken, SpeculationStats

NUM_RANDOM_SCHEDULES = 10


@contract(
    "A drafter that runs ahead, in trees of any shape: one request, then seven at once.",
    (
        *grid(
            "{shape}, page {page_size}",
            shape=[shape_of(1, 1, 2), shape_of(3, 2, 2), CHAIN, shape_of(3, 4, 16), shape_of(5, 2, 8)],
            page_size=(1, 4, 16),
            is_auto=False,
        ),
        Case("a shape that follows what is accepted", shape=shape_of(5, 2, 8), page_size=4, is_auto=True),
    ),
)
def any_shape_ahead(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl,
        erratic(1),
        case.shape,
        page_size=case.page_size,
        runs_ahead=True,
        speculative_auto=case.is_auto,
    )
    if harness is not None:
        speculation.one_then_seven(harness)


@contract(
    "Ends inside an accepted run, with a drafter that runs ahead: the rest is dropped, and all comes back.",
    grid("{num_tokens} tokens, page {page_size}", page_size=(1, 4), num_tokens=range(1, 13)),
)
def end_inside_ahead(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, perfect, TREE, page_size=case.page_size, runs_ahead=True)
    if harness is None:
        return
    last = expected_tokens(PROMPT, case.num_tokens, VOCAB_SIZE)[-1]
    num_tokens = expected_tokens(PROMPT, 20, VOCAB_SIZE).index(last) + 1
    rid = harness.submit(PROMPT, 20, eos=frozenset([last]), return_logprob=True)
    mate = harness.submit([*PROMPT, 1], 20)
    harness.run()
    harness.expect(rid, num_tokens)
    harness.expect(mate, 20)
    expect_equal("its reason", harness.ended[rid], FinishToken(last))
    logprobs = [entry.token_id for entry in harness.logprobs[rid]]
    expect_equal("tokens of its log-probabilities", logprobs, harness.tokens[rid])
    again = harness.submit([*PROMPT, *harness.tokens[rid], 2], 5)
    harness.run()
    harness.expect(again, 5)
    harness.expect_idle()


@contract("As many drafts are accepted as without running ahead, and reported.", EXAMPLE)
def acceptance_ahead(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, perfect, CHAIN, runs_ahead=True)
    if harness is None:
        return
    rid = harness.submit(PROMPT, 1 + 4 * 5)
    harness.run()
    harness.expect(rid, 1 + 4 * 5)
    expect_equal("what it reports", harness.log[-1].speculation, SpeculationStats(5, 15, 15))
    expect_equal("what the scheduler reports", harness.scheduler.stats().speculation, (5, 15, 15))


@contract(
    "Sampling parameters count tokens that the CPU does not have yet: a whole run of them.",
    table(
        "params",
        ("penalties", {"frequency_penalty": 1.1, "presence_penalty": 0.4, "repetition_penalty": 1.5}),
        ("least length", {"min_new_tokens": 9}),
        ("sampled", {"temperature": 0.6, "min_p": 0.2, "min_new_tokens": 6, "frequency_penalty": 0.3}),
    ),
)
def asked_ahead(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, erratic(2, is_spread=True), TREE, runs_ahead=True, is_spread=True)
    if harness is None:
        return
    rids = [
        harness.submit(
            [i, i + 1, 2],
            24,
            seed=i + 5,
            eos=frozenset(range(i, VOCAB_SIZE, 4)),
            return_logprob=True,
            top_logprobs_num=2,
            **case.params,
        )
        for i in range(6)
    ]
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()


@contract("A grammar is asked at every node of a tree that its text may come to.", EXAMPLE)
def grammar_at_nodes(impl: type[Scheduler], case: Case) -> None:
    for runs_ahead in (False, True):
        for shape in (CHAIN, TREE):
            harness = harness_for(
                impl, erratic(3, is_spread=True), shape, page_size=4, runs_ahead=runs_ahead, is_spread=True
            )
            if harness is None:
                return
            rids = [harness.submit(PROMPT, 20, grammar=EveryThird())]
            rids.append(harness.submit([4, 4], 12, grammar=EveryThird(), temperature=1.0, seed=5))
            rids.append(harness.submit([9], 12))
            harness.run()
            for rid in rids:
                harness.expect_what_it_gets_alone(rid)
            num_accepted = harness.scheduler.stats().speculation.num_accepted_tokens
            expect_true("something was accepted", num_accepted > 0, num_accepted)
            harness.expect_idle()


@contract(
    "Under any schedule of requests that ask anything, drafted for by one that runs ahead.",
    tuple(random_speculation(seed, True, True) for seed in range(NUM_RANDOM_SCHEDULES)),
)
def any_schedule_ahead(impl: type[Scheduler], case: Schedule) -> None:
    assert case.drafts is not None
    if harness_for(impl, erratic(0), case.drafts.shape) is not None:
        run_schedule(case, {"scheduler": impl})
