"""Times of an answer, with a clock that the test moves."""

from dataclasses import replace

import pytest
from fake_engine import FakeLLM

from diptych.shared.tools.commands.printed_answer import Answer, collect
from diptych.shared.types import FinishLength, GenerateOutput, SamplingParams, SpeculationStats


def piece(ids: list[int], finish: FinishLength | None = None) -> GenerateOutput:
    return GenerateOutput(
        rid="r", index=0, text="x" * len(ids), output_ids=ids, finish_reason=finish, num_prompt_tokens=4,
        num_output_tokens=0, num_cached_tokens=3,
    )  # fmt: skip


def test_speed_counts_from_the_first_token() -> None:
    answer = Answer()
    answer.add(piece([1]), 2.0)
    answer.add(piece([2, 3]), 2.5)
    answer.add(piece([4], FinishLength(4)), 3.0)
    assert answer.time_to_first_token == 2.0
    assert answer.tokens_per_second == pytest.approx(3 / 1.0)
    assert answer.total_time == 3.0
    assert answer.finish_reason == "length"


def test_single_token_has_no_speed() -> None:
    answer = Answer()
    answer.add(piece([1], FinishLength(1)), 2.0)
    assert answer.tokens_per_second is None
    assert "tokens/s" not in answer.summary()


def test_acceptance_is_reported_with_and_without_the_bonus_token() -> None:
    answer = Answer()
    answer.add(replace(piece([1, 2], FinishLength(2)), speculation=SpeculationStats(4, 12, 6)), 2.0)
    assert "2.50 tokens per verification (1.50 without the bonus token), 50% of drafts" in answer.summary()
    assert answer.as_dict()["speculation"] == {
        "num_verifications": 4,
        "num_drafted_tokens": 12,
        "num_accepted_tokens": 6,
        "acceptance_length": 1.5,
        "acceptance_length_with_bonus": 2.5,
        "acceptance_rate": 0.5,
    }
    plain = Answer()
    plain.add(piece([1], FinishLength(1)), 2.0)
    assert "verification" not in plain.summary()
    assert "speculation" not in plain.as_dict()


def test_pieces_without_tokens_do_not_start_the_clock() -> None:
    answer = Answer()
    answer.add(piece([]), 1.0)
    answer.add(piece([1]), 2.0)
    assert answer.time_to_first_token == 2.0


def test_collect_times_from_the_request() -> None:
    ticks = iter([10.0, 10.5, 11.0, 11.5])
    llm = FakeLLM(answer="abc")
    answer = collect(lambda: llm.stream("p", SamplingParams()), clock=lambda: next(ticks))
    assert (answer.text, answer.time_to_first_token, answer.total_time) == ("abc", 0.5, 1.5)
    assert answer.tokens_per_second == pytest.approx(2.0)
