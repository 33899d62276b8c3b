"""Random load on a whole engine: some rounds that hold, and bugs that a round sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.reference.sampler import Sampler
from diptych.reference.scheduler import Scheduler
from diptych.shared.scheduling.invariants import InvariantViolation
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.whole_engine.random_load import Question
from diptych.shared.tools.conformance.whole_engine.soak import Soak, Tally
from diptych.shared.types import GenerateOutput, Req, SamplingParams
from tests.conformance.mutants.scheduling import AbortLeaksMemory

HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
OPTIMIZED = dict.fromkeys(HOST_PARTS, "optimized")
CPU = {"model": "tiny-dense", "device": "cpu", "panel": "reference"}


def play(soak: Soak, num_rounds: int, first_seed: int = 4) -> Tally:
    total = Tally()
    for seed in range(first_seed, first_seed + num_rounds):
        total = total.plus(soak.round(seed))
    return total


@pytest.mark.parametrize(
    "use", [pytest.param({}, id="reference", marks=pytest.mark.full), pytest.param(OPTIMIZED, id="optimized")]
)
def test_rounds_hold(use: dict[str, str]) -> None:
    total = play(Soak({**CPU, "use": use}, num_acts=50), num_rounds=2)
    assert total.num_requests > 25
    assert total.num_retractions > 0
    assert 0 < total.num_cut < total.num_requests / 2
    assert total.num_near_ties <= 1


def test_a_round_follows_from_its_seed() -> None:
    soak = Soak(CPU, num_acts=12)
    assert soak.round(7) == soak.round(7) != soak.round(8)


class SecondBest(Sampler):
    num_calls = 0

    def sample(self, logits: Any, info: Any, positions: Any) -> Any:
        output = super().sample(logits, info, positions)
        SecondBest.num_calls += 1
        if SecondBest.num_calls == 9:
            output.next_token_ids[0] = logits[0].topk(3).indices[2]
        return output


class KeepsTheRetractedToken(Scheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.right, self.requests.retract = self.requests.retract, self.wrong  # type: ignore[method-assign]

    def wrong(self, req: Req) -> None:
        self.right(req)
        if len(req.output_ids) > 1:
            req.output_ids.pop()


LeaksOnAbort = AbortLeaksMemory.planted


@pytest.mark.parametrize(
    ("use", "first_seed"),
    [
        ({"sampler": f"{__name__}:{SecondBest.__name__}"}, 4),
        ({"scheduler": f"{__name__}:{KeepsTheRetractedToken.__name__}"}, 17),
        ({"scheduler": f"{__name__}:LeaksOnAbort"}, 4),
    ],
    ids=["wrong token", "lost token", "leak"],
)
def test_bugs_are_seen(use: dict[str, str], first_seed: int) -> None:
    soak = Soak({**CPU, "use": use}, num_acts=30)
    with pytest.raises((Mismatch, InvariantViolation)):
        play(soak, num_rounds=6, first_seed=first_seed)


def test_near_ties_are_distinguished_from_wrong_tokens() -> None:
    soak = Soak(CPU)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, return_logprob=True, top_logprobs_num=2)
    question = Question([5, 6, 7], params, {})
    (_, best), (other, second) = ask(soak, question).output_logprobs[0].top
    for distance, is_near in ((5e-4, True), (5e-2, False)):
        bias = best - second - distance  # `other` nearly wins, or not so nearly
        asked = replace(question, params=replace(params, logit_bias={other: bias}))
        alone = ask(soak, asked)
        got = replace(alone, output_ids=[other])
        assert alone.output_ids != got.output_ids
        if is_near:
            soak._expect_near_tie(asked, got, alone)
        else:
            with pytest.raises(Mismatch, match="token 0"):
                soak._expect_near_tie(asked, got, alone)


def ask(soak: Soak, question: Question) -> GenerateOutput:
    return soak._answers_alone(question, question.params)[0]


def test_half_types_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype=bfloat16"):
        Soak({**CPU, "dtype": "bfloat16"})
