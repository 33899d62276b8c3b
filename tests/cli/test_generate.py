"""`diptych generate`, with an engine that answers from a script."""

import json
from collections.abc import Callable

import pytest
from fake_engine import FakeLLM
from typer.testing import Result

Diptych = Callable[..., Result]


def test_prints_the_answer_and_one_line_about_it(fake: FakeLLM, diptych: Diptych) -> None:
    result = diptych("generate", "Where?")
    assert result.exit_code == 0
    answer, summary = result.stdout.splitlines()
    assert answer == "Bergen."
    assert summary.startswith("7 tokens, ")
    for part in ("tokens/s", "first token after", "22 prompt tokens", "11 of them from the prefix cache"):
        assert part in summary
    assert fake.text_of(0) == "user:Where?|assistant:"


def test_system_message_comes_first(fake: FakeLLM, diptych: Diptych) -> None:
    diptych("generate", "Where?", "--system", "Be brief.")
    assert fake.text_of(0) == "system:Be brief.|user:Where?|assistant:"


def test_raw_text_is_left_alone(fake: FakeLLM, diptych: Diptych) -> None:
    diptych("generate", "--raw", "Once upon")
    assert fake.prompts == ["Once upon"]


def test_raw_and_system_contradict_each_other(fake: FakeLLM, diptych: Diptych) -> None:
    result = diptych("generate", "--raw", "x", "--system", "y")
    assert (result.exit_code, result.stderr.splitlines()) == (
        2,
        ["error: --raw gives the text as it is: it cannot be combined with --system"],
    )


@pytest.mark.parametrize("arguments", [["-"], []])
def test_reads_standard_input(fake: FakeLLM, diptych: Diptych, arguments: list[str]) -> None:
    diptych("generate", "--raw", *arguments, input="two\nlines\n")
    assert fake.prompts == ["two\nlines"]


def test_several_prompts_are_answered_in_order(fake: FakeLLM, diptych: Diptych) -> None:
    result = diptych("generate", "--raw", "one", "two")
    assert fake.prompts == ["one", "two"]
    assert [line for line in result.stdout.splitlines() if line.startswith(">")] == ["> one", "> two"]


@pytest.mark.parametrize("mode", [["--stream"], ["--no-stream"]])
def test_text_is_printed_once(fake: FakeLLM, diptych: Diptych, mode: list[str]) -> None:
    assert diptych("generate", "x", *mode).stdout.count("Bergen.") == 1


def test_json_is_one_object_a_line(fake: FakeLLM, diptych: Diptych) -> None:
    result = diptych("generate", "--raw", "one", "three", "--json", "--logprobs", "--top-logprobs", "1")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["prompt"], first["text"], first["finish_reason"]) == ("one", "Bergen.", "stop")
    assert (first["num_prompt_tokens"], second["num_prompt_tokens"]) == (3, 5)
    assert second["num_cached_tokens"] == 2
    assert first["output_ids"] == [ord(letter) for letter in "Bergen."]
    assert first["output_logprobs"][0] == {"token_id": ord("B"), "logprob": -0.5, "top": [[ord("x"), -1.25]]}
    assert 0 <= first["time_to_first_token_s"] <= first["total_time_s"]
    assert fake.params[0].return_logprob
    assert fake.params[0].top_logprobs_num == 1


def test_logprobs_are_shown_as_a_table(fake: FakeLLM, diptych: Diptych) -> None:
    output = diptych("generate", "x", "--logprobs").stdout
    assert "'g'" in output
    assert "-0.5000" in output
    assert "'x' -1.250" in output


def test_options_reach_engine_and_sampler(fake: FakeLLM, diptych: Diptych) -> None:
    options = "--model tiny-moe --page-size 16 --use sampler=reference -t 0.5 --seed 3 -n 9 --stop END"
    assert diptych("generate", "x", *options.split()).exit_code == 0
    flags = {"model": "tiny-moe", "page_size": 16, "use": {"sampler": "reference"}}
    assert fake.flags == flags  # type: ignore[attr-defined]
    params = fake.params[0]
    assert (params.temperature, params.seed, params.max_new_tokens, params.stop) == (0.5, 3, 9, ("END",))


@pytest.mark.parametrize(("kind", "status"), [("stop", 0), ("length", 0), ("abort", 130)])
def test_exit_status_says_how_it_ended(fake: FakeLLM, diptych: Diptych, kind: str, status: int) -> None:
    fake.finish = kind
    result = diptych("generate", "x")
    assert result.exit_code == status
    assert ("the queue is full" in result.stdout) == (kind == "abort")


def test_interrupt_keeps_what_came(fake: FakeLLM, diptych: Diptych) -> None:
    fake.interrupt_after = 3
    result = diptych("generate", "x")
    assert result.stdout.startswith("Ber\n3 tokens")
    assert "interrupted" in result.stdout
    assert result.exit_code == 130


def test_bad_values_are_one_line_on_stderr(fake: FakeLLM, diptych: Diptych) -> None:
    result = diptych("generate", "x", "--temperature", "-1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: temperature must be")


def test_debug_shows_where_an_error_came_from(fake: FakeLLM, diptych: Diptych) -> None:
    result = diptych("--debug", "generate", "x", "--temperature", "-1")
    assert isinstance(result.exception, ValueError)
    assert result.stderr == ""
