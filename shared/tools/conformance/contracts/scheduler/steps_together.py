"""Clauses of the scheduler: decode steps that are launched together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.contracts.scheduler.schedules import PROMPT, harness_for
from diptych.shared.tools.conformance.oracles.answer_alone import EveryThird
from diptych.shared.tools.conformance.oracles.schedules import (
    Schedule,
    random_faults,
    random_schedule,
    run_schedule,
)


def _together(schedule: Schedule, num_steps: int) -> Schedule:
    name = f"{schedule.name}, up to {num_steps} steps"
    return replace(schedule, name=name, num_continuous_decode_steps=num_steps)


@contract(
    "Under any schedule, whatever num_continuous_decode_steps: the tokens and the end that each gets alone.",
    (
        *(_together(random_schedule(seed, is_spread=True), 2 + seed % 4) for seed in range(8)),
        *(_together(random_schedule(seed), 2 + seed % 6) for seed in range(8, 16)),
        *(_together(random_faults(seed), 3) for seed in range(4)),
    ),
)
def any_schedule_of_steps_together(impl: type[Scheduler], case: Schedule) -> None:
    run_schedule(case, {"scheduler": impl})


@contract(
    "num_continuous_decode_steps are launched together, fewer where a request has fewer tokens left, and one "
    "behind a prompt.",
    grid("{num_steps} steps, pages of {page_size}", num_steps=(2, 4, 16), page_size=(1, 4)),
)
def steps_together(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, num_continuous_decode_steps=case.num_steps, page_size=case.page_size)
    rids = [harness.submit([*PROMPT, i], 12) for i in range(3)]
    harness.run()
    for rid in rids:
        harness.expect(rid, 12)
    nums = [len(output.new_token_ids) for output in harness.log if output.rid == rids[0]]
    left, expected = 10, [1, 1]
    while left > 0:
        expected.append(min(case.num_steps, left))
        left -= expected[-1]
    expect_equal("tokens of each launch", [n for n in nums if n], expected)
    num_computed = sum(len(harness.reqs[rid].origin_input_ids) + 11 for rid in rids)
    found = harness.model_runner.num_computed_tokens
    expect_equal("tokens computed: none behind an end", found, num_computed)
    harness.expect_idle()


@contract("Cached prefixes make room for steps together; no request is retracted for them.", EXAMPLE)
def room_for_steps_together(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, num_continuous_decode_steps=4, pool_tokens=32)
    for token in (9, 8):  # fills the cache
        harness.submit([token] * 16, 8)
        harness.run()
    rids = [harness.submit([i, *PROMPT], 9) for i in (1, 2)]
    harness.run()
    nums = [len(output.new_token_ids) for output in harness.log if output.rid == rids[0]]
    expect_equal("tokens of each launch", [n for n in nums if n], [1, 1, 4, 3])
    expect_equal("retractions", harness.scheduler.stats().num_retractions, 0)
    for rid in rids:
        harness.expect(rid, 9)
    harness.expect_idle()


@contract(
    "Where a sampler reads earlier tokens, or gives log-probabilities, each step is launched alone.",
    table(
        "params",
        ("penalty", {"frequency_penalty": 1.5}),
        ("minimum", {"min_new_tokens": 9}),
        ("grammar", {"grammar": True}),
        ("log-probabilities", {"return_logprob": True}),
    ),
)
def steps_alone(impl: type[Scheduler], case: Case) -> None:
    params: dict[str, Any] = dict(case.params)
    if params.pop("grammar", False):
        params["grammar"] = EveryThird()
    harness = harness_for(impl, is_spread=True, num_continuous_decode_steps=4)
    rid = harness.submit(PROMPT, 9, **params)
    harness.run()
    nums = [len(output.new_token_ids) for output in harness.log if output.rid == rid]
    expect_equal("tokens of each launch", [n for n in nums if n], [1] * 9)
    harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()
