"""What schedulers do beyond their contract."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from diptych.optimized import scheduler
from diptych.optimized.decoding import has_short_steps
from diptych.shared import registry
from diptych.shared.config import EngineConfig, read_config
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.scheduling.admission import DECAY_STEPS, NewTokenRatio
from diptych.shared.tools.conformance.oracles.scheduler_harness import SchedulerHarness


def test_new_token_ratio_falls_while_all_goes_well_and_rises_on_retraction() -> None:
    harness = SchedulerHarness(pool_tokens=64, schedule_conservativeness=0.01)
    initial = harness.scheduler.stats().new_token_ratio
    rids = [harness.submit([i, i + 1, i + 2], 25) for i in range(8)]
    ratios, retractions = [], []
    while harness.scheduler.has_work():
        harness.step()
        ratios.append(harness.scheduler.stats().new_token_ratio)
        retractions.append(harness.scheduler.stats().num_retractions)
    first = next(i for i, n in enumerate(retractions) if n)
    assert all(a >= b for a, b in pairwise(ratios[:first]))
    assert initial * 0.14 <= min(ratios) <= max(ratios) <= 1.0
    assert ratios[first] > ratios[first - 1]
    assert set(harness.ended) == set(rids)


def test_new_token_ratio_reaches_its_least_value_and_stays() -> None:
    ratio = NewTokenRatio(1.0)
    for _ in range(DECAY_STEPS):
        ratio.decay()
    assert abs(ratio.current - ratio.least) < 1e-9
    ratio.decay()
    assert ratio.current == ratio.least


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@pytest.mark.parametrize("first", [True, False])
def test_one_of_two_requests_of_a_prefill_gets_log_probabilities(panel: str, first: bool) -> None:
    harness = SchedulerHarness(replace={"scheduler": registry.load("scheduler", panel)}, is_spread=True)
    asked = {"return_logprob": True, "logprob_start_len": 0}
    rids = [harness.submit([i, 5, 7, 2], 4, **(asked if i == first else {})) for i in range(2)]
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)


@pytest.mark.parametrize(
    ("num_reqs", "max_replayed_bs", "num_steps"),
    [(1, 64, 4), (16, 64, 4), (16, 8, 1), (20, 64, 3), (40, 64, 1)],
)
def test_short_steps_are_launched_together(
    num_reqs: int, max_replayed_bs: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the flag says nothing."""
    monkeypatch.setattr(scheduler, "has_short_steps", lambda *of_engine: True)
    harness = SchedulerHarness(
        replace={"scheduler": scheduler.Scheduler}, pool_tokens=1024, max_running_requests=64
    )
    harness.model_runner.max_replayed_bs = max_replayed_bs
    rids = [harness.submit([i, 1, 2], 14) for i in range(num_reqs)]
    harness.run()
    for rid in rids:
        harness.expect(rid, 14)
    nums = [len(output.new_token_ids) for output in harness.log if output.rid == rids[0]]
    assert [n for n in nums if n] == [1, 1, *[num_steps] * (12 // num_steps)]


@pytest.mark.parametrize(
    ("flags", "is_large", "expected"),
    [
        ({}, False, True),
        ({"num_continuous_decode_steps": 2}, False, False),
        ({"pp": 2}, False, False),
        ({"speculative": "ngram"}, False, False),
        ({}, True, False),
        ({"dtype": "float32"}, True, False),
    ],
    ids=str,
)
def test_which_engines_have_short_steps(flags: dict[str, Any], is_large: bool, expected: bool) -> None:
    model = read_config(ASSETS / "tiny-dense")
    if is_large:
        model = replace(model, vocab_size=10**7)
    assert has_short_steps(EngineConfig(**flags), model, torch.device("cuda")) is expected
    assert not has_short_steps(EngineConfig(**flags), model, torch.device("cpu"))
