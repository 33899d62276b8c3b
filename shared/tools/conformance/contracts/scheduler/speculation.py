"""Clauses of the scheduler, third part: with a drafter, every request still gets its right tokens.

The ledger drafter has its own KV. At every call it asserts that this KV is complete and that of the requests'
tokens.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.ledger_drafter import (
    erratic,
    perfect,
    right_for,
    silent,
    useless,
)
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness
from diptych.shared.tools.conformance.oracles.schedules import Schedule, random_speculation, run_schedule
from diptych.shared.tools.conformance.oracles.speculative_harness import (
    CHAIN,
    PROMPT,
    TREE,
    harness_for,
    shape_of,
)
from diptych.shared.types import DraftShape, SpeculationStats

NUM_RANDOM_SCHEDULES = 24


GRID = grid(
    "{shape}, page {page_size}",
    shape=list(dict.fromkeys(shape_of(*numbers) for numbers in product((1, 3, 5), (1, 2, 4), (2, 8, 16)))),
    page_size=(1, 4, 16),
)


@contract("Whatever is drafted, in trees of any shape: one request, then seven at once.", GRID)
def any_shape(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, erratic(1), case.shape, page_size=case.page_size)
    if harness is not None:
        one_then_seven(harness)


def one_then_seven(harness: SchedulerHarness) -> None:
    rids = [harness.submit(PROMPT, 16)]
    harness.run()
    rids += [harness.submit([3, 1, 4, 1, 5][: i % 5 + 1] * (1 + i % 4) + [i], 11 + i) for i in range(7)]
    harness.run()
    for rid, num_tokens in zip(rids, [16, *range(11, 18)]):
        harness.expect(rid, num_tokens)
    harness.expect_idle()


@contract(
    "As many drafts are accepted as are right, whole trees too, and reported.",
    tuple(
        Case(f"{name}, {'/'.join(map(str, shape))}", guess=guess, shape=shape, num_accepted=num)
        for shape in (CHAIN, TREE, DraftShape(3, 4, 16))
        for name, guess, num in (
            ("all right", perfect, shape.num_steps),
            ("all wrong", useless, 0),
            ("none", silent, 0),
            ("one right", right_for(1), 1),
            ("two right", right_for(2), 2),
        )
    ),
)
def acceptance(impl: type[Scheduler], case: Case) -> None:
    """`num_accepted`: at each verification, except for the last tokens."""
    harness = harness_for(impl, case.guess, case.shape)
    if harness is None:
        return
    num_rounds = 4
    num_tokens = 1 + num_rounds * (1 + case.num_accepted)
    rid = harness.submit(PROMPT, num_tokens + 50)
    harness.step()
    for _ in range(num_rounds):
        harness.step()
    tokens = expected_tokens(PROMPT, num_tokens, VOCAB_SIZE)
    expect_equal("tokens after four rounds", harness.tokens[rid], tokens)
    num_drafted = 0 if case.guess is silent else num_rounds * case.shape.num_steps
    stats = SpeculationStats(num_rounds, num_drafted, num_rounds * case.num_accepted)
    expect_equal("what the request reports", harness.log[-1].speculation, stats)
    expect_equal("what the scheduler reports", harness.scheduler.stats().speculation, stats)
    harness.run()
    harness.expect(rid, num_tokens + 50)
    harness.expect_idle()


@contract(
    "Prompts in chunks and cached prefixes: the drafter's KV is that of the tokens, at every position.",
    table(
        "chunk page_size disable_radix_cache",
        ("whole", None, 1),
        ("chunks of 8", 8, 1),
        ("chunks of 16, page 4", 16, 4),
        ("chunks of 16, page 16", 16, 16),
        ("chunks of 8, no radix cache", 8, 1, True),
        disable_radix_cache=False,
    ),
)
def chunks_and_prefixes(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl,
        perfect,
        TREE,
        chunked_prefill_size=case.chunk,
        page_size=case.page_size,
        disable_radix_cache=case.disable_radix_cache,
    )
    if harness is None:
        return
    prompt = [(7 * i) % 50 for i in range(40)]
    first = harness.submit(prompt, 12)
    harness.run()
    rids = [harness.submit(prompt, 12), harness.submit([*prompt, *harness.tokens[first], 1, 2], 12)]
    rids.append(harness.submit([*prompt[:30], 60], 12))
    harness.run()
    for rid in [first, *rids]:
        harness.expect(rid, 12)
    if not case.disable_radix_cache:
        page_size = case.page_size
        num_cached = [harness.reqs[rid].num_cached_tokens for rid in rids]
        # A bigram cache keeps one token less of each request.
        most = [39, 50, 29]  # the pair of token 29 and what follows it differs
        expect_equal("cached tokens", num_cached, [n // page_size * page_size for n in most])
    harness.expect_idle()


@contract(
    "Sampled tokens and their log-probabilities are those of one token at a time, whatever the parameters.",
    table(
        "params",
        ("plain", {}),
        ("low temperature", {"temperature": 2.0}),
        ("filters", {"top_k": 20, "top_p": 0.8, "min_p": 0.02}),
        ("penalties", {"frequency_penalty": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.4}),
        ("greedy penalties", {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 4.0}),
        ("bias", {"logit_bias": {3: 6.0, 4: -100.0}}),
        ("least length", {"min_new_tokens": 9}),
        ("least length of allowed tokens", {"min_new_tokens": 9, "allowed_token_ids": tuple(range(8, 24))}),
        ("log-probabilities of named tokens", {"token_ids_logprob": (9, 2)}),
    ),
)
def sampling_parameters(impl: type[Scheduler], case: Case) -> None:
    def run(harness: SchedulerHarness) -> list[Any]:
        rids = [
            harness.submit(
                [i, i + 1, 2],
                24,
                seed=i + 5,
                eos=frozenset([7, 9, 30]),
                return_logprob=True,
                top_logprobs_num=2,
                **{"temperature": 10.0, **case.params},
            )
            for i in range(5)
        ]
        harness.run()
        harness.expect_idle()
        return [(harness.reqs[rid].output_ids, harness.reqs[rid].output_logprobs) for rid in rids]

    expected = run(SchedulerHarness(replace={"scheduler": impl}))
    for guess in (perfect, erratic(4)):
        harness = harness_for(impl, guess, TREE, page_size=4)
        if harness is not None:
            expect_equal("tokens and log-probabilities", run(harness), expected)


@contract(
    "Under any schedule of arrivals, aborts and retractions, with the invariants after every step.",
    tuple(random_speculation(seed) for seed in range(NUM_RANDOM_SCHEDULES)),
)
def any_schedule_of_drafts(impl: type[Scheduler], case: Schedule) -> None:
    assert case.drafts is not None
    if harness_for(impl, silent, case.drafts.shape) is not None:
        run_schedule(case, {"scheduler": impl})
