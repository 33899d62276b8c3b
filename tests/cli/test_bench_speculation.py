"""`diptych bench speculation`: both engines are asked the same, and the table says what came."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from diptych.shared.tools.bench.speculation_gain import Comparison, Departure
from diptych.shared.tools.commands.bench_speculation import choose_batches, departures_text

EAGLE3 = ["eagle3", "--speculative-draft-model=tiny-dense-eagle3"]
STANDALONE = ["standalone", "--speculative-draft-model=tiny-dense"]
OPTIONS = ["--device=cpu", "--max-total-tokens=1024", "--repeats=1", "--warm-ups=0", "-n", "8"]


@pytest.mark.parametrize("algorithm", [EAGLE3, STANDALONE, ["ngram"]], ids=lambda words: words[0])
def test_bench_speculation_compares(
    algorithm: list[str], diptych: Callable[..., Result], tmp_path: Path
) -> None:
    file, prompts = tmp_path / "speculation.json", tmp_path / "prompts.txt"
    prompts.write_text("Count from 3 to 20.\nWhat is 12 + 30?\n")
    result = diptych(
        "bench", "speculation", "--speculative", *algorithm, *OPTIONS, "--panel=reference",
        "--batch=1,2", f"--prompts={prompts}", "-o", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "2 of 2" in result.stdout
    data = json.loads(file.read_text())
    assert data["flags"]["speculative"] == algorithm[0]
    assert [case["batch_size"] for case in data["results"]] == [1, 2]
    for case in data["results"]:
        assert case["departures"] == []
        assert case["num_requests"] == 2
        assert case["speedup"] == pytest.approx(case["speculative_tokens_per_s"] / case["plain_tokens_per_s"])
        (plain,), (speculative,) = case["plain"], case["speculative"]
        assert plain["num_output_tokens"] == speculative["num_output_tokens"]
        assert plain["speculation"]["num_verifications"] == 0
        assert speculative["speculation"]["num_verifications"] == case["num_verifications"]
    if algorithm is STANDALONE:  # it drafts for itself: everything is right
        assert data["results"][0]["num_verifications"] < data["results"][0]["plain"][0]["num_steps"]


def test_bad_input_is_refused(diptych: Callable[..., Result], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi.\n")

    def error_of(*options: str) -> str:
        result = diptych("bench", "speculation", *options)
        assert result.exit_code != 0
        return f"{result.output} {result.exception}"

    ngram = "--speculative=ngram"
    assert "choose what is measured" in error_of()
    assert "--batch must be 1 to 1" in error_of(ngram, f"--prompts={prompts}", "--batch=1,2")
    assert "fewer than --num-prompts 3" in error_of(ngram, f"--prompts={prompts}", "--num-prompts=3")
    assert "cannot read prompts" in error_of(ngram, f"--prompts={tmp_path / 'missing'}")
    assert "no folder" in error_of(ngram, "-o", str(tmp_path / "no" / "file.json"))


def test_batches_are_those_that_there_are_prompts_for() -> None:
    assert choose_batches(None, 10) == (1, 8)
    assert choose_batches("2,4", 10) == (2, 4)


def test_texts_that_differ_are_spoken_of() -> None:
    case = Comparison(8, departures=[Departure(0, 3, 0.02), Departure(4, 1, 0.3)])
    assert departures_text(case) == "2 texts part, where log-probabilities are at most 0.3 apart"
    case.departures.append(Departure(5, 0, None))
    assert departures_text(case).endswith("; 1 of them where one of the tokens is not likely at all")
