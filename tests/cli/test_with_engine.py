"""The commands with the real engine and the built-in models."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import Result

from diptych.shared import registry
from diptych.shared.engine.build import assembly
from diptych.shared.tools.bench import ceilings
from diptych.shared.tools.bench.step_cost import Ceilings

MY_RADIX_CACHE = f"{Path(__file__).parents[2] / 'docs' / 'examples' / 'my_radix_cache.py'}:MyRadixCache"

Diptych = Callable[..., Result]

STORY = (
    "Read this story: Mara lives in Bergen. Mara is a baker. Otto bought 12 eggs. Otto has a red notebook."
)
QUESTIONS = (f"{STORY}\nIn which city does Mara live?", f"{STORY}\nHow many eggs did Otto buy?")


def answers(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_built_in_models_answer(diptych: Diptych, model: str) -> None:
    first, second = answers(diptych("generate", "--json", "--model", model, *QUESTIONS))
    assert "Bergen" in first["text"]
    assert "12" in second["text"]
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "stop")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--load-format", "dummy", "Hello"),
        ("bench", "offline"),
        ("bench", "step", "--batch", "1"),
    ],
    ids=" ".join,
)
def test_model_larger_than_the_free_memory_is_refused(
    diptych: Diptych, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 10**9, total=16 * 10**9)
    )
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *arguments: Ceilings(1e10, 1e11))
    result = diptych(*command, "--device", "cpu", "--model", "Qwen3-8B")
    assert result.exit_code == 2, result.output
    refusal = "Qwen3ForCausalLM of 8.19 billion parameters in float32 needs 32.8 GB, 8.0 GB are free"
    assert result.stderr.splitlines()[-1] == f"error: {refusal} on this computer"


def test_second_question_finds_the_story_in_the_cache(diptych: Diptych) -> None:
    first, second = answers(diptych("generate", "--json", *QUESTIONS))
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] > second["num_prompt_tokens"] // 2


def test_flags_reach_the_engine_and_leave_the_answer_alone(diptych: Diptych) -> None:
    plain = answers(diptych("generate", "--json", *QUESTIONS))
    flags = ["--disable-radix-cache", "--page-size", "4", "--chunked-prefill-size", "16"]
    flags += ["--enable-mixed-chunk", "--schedule-policy", "lpm", "--max-total-tokens", "256"]
    other = answers(diptych("generate", "--json", *flags, "--check-invariants", *QUESTIONS))
    assert [answer["num_cached_tokens"] for answer in other] == [0, 0]
    assert [answer["output_ids"] for answer in other] == [answer["output_ids"] for answer in plain]


def test_streamed_text_is_the_whole_text(diptych: Diptych) -> None:
    (whole,) = answers(diptych("generate", "--json", QUESTIONS[0]))
    streamed = diptych("generate", QUESTIONS[0]).stdout.splitlines()
    assert streamed[0] == whole["text"]
    assert streamed[-1].startswith(f"{whole['num_output_tokens']} tokens, ")


def test_logprobs_of_greedy_tokens_lead_their_alternatives(diptych: Diptych) -> None:
    (answer,) = answers(diptych("generate", "--json", "--top-logprobs", "2", "What is 12 + 30?"))
    assert len(answer["output_logprobs"]) == len(answer["output_ids"])
    for token in answer["output_logprobs"]:
        assert token["top"][0] == [token["token_id"], token["logprob"]]
        assert token["logprob"] <= 0.0


def test_chat_reuses_the_conversation(diptych: Diptych) -> None:
    script = (
        "\n".join([QUESTIONS[0].replace("\n", " "), "How many eggs did Otto buy?", "/stats", "/exit"]) + "\n"
    )
    result = diptych("chat", input=script)
    assert result.exit_code == 0, result.output
    assert "Bergen" in result.stdout
    assert "12 eggs" in result.stdout
    first, second = (line for line in result.stdout.splitlines() if "from the prefix cache" in line)
    assert first.endswith(": 0%)")
    assert int(second.rpartition(": ")[2].removesuffix("%)")) > 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--use", "sampler=no-such-sampler"], "choose one of reference"),
        (["--page-size", "0"], "page_size must be"),
        (["--device", "tpu"], "device must be"),
        (["--max-total-tokens", "4"], "token"),
        (["--top-k", "0"], "top_k must be"),
        (["--panel", "optimised"], "panel must be one of reference, optimized"),
    ],
)
def test_bad_requests_are_one_line_and_status_2(diptych: Diptych, arguments: list[str], message: str) -> None:
    result = diptych("generate", *arguments, "Hello, what is 12 + 30?")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("class Mine(:", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_file_of_ones_own_that_cannot_be_imported(
    diptych: Diptych, tmp_path: Path, code: str, reason: str
) -> None:
    target = f"{tmp_path / 'mine.py'}:Mine"
    (tmp_path / "mine.py").write_text(code)
    for command in (("generate", "--use", f"sampler={target}", "Hello"), ("check", "sampler", target)):
        result = diptych(*command)
        assert result.exit_code == 2, result.output
        assert result.stderr == f"error: cannot load {target}: {reason}\n"


def test_a_module_of_ones_own_that_cannot_be_imported_and_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot load broken_module:Mine: RuntimeError: no luck"):
        registry.load("sampler", "broken_module:Mine")
    # A defect of ours keeps its trace.
    monkeypatch.setitem(registry.IMPLEMENTATIONS["sampler"], "reference", "broken_module:Mine")
    with pytest.raises(RuntimeError, match="no luck"):
        registry.load("sampler", "reference")


@pytest.mark.parametrize(
    ("component", "problem"),
    [
        ("sampler", "MyRadixCache is no subclass of diptych.shared.interfaces.Sampler and lacks sample"),
        (
            "model_runner",
            "MyRadixCache is no subclass of diptych.shared.interfaces.ModelRunner and lacks forward, "
            "forward_and_sample",
        ),
        ("layers", "MyRadixCache has no RMSNorm; it must hold RMSNorm, RotaryEmbedding, SiluAndMul"),
        ("models", "MyRadixCache has no model_class"),
        ("draft_models", "MyRadixCache has no draft_model_class"),
        (
            "drafter",
            "MyRadixCache is no subclass of diptych.shared.interfaces.Drafter and lacks draft, extend",
        ),
    ],
)
def test_a_class_of_another_component_is_refused_before_weights_are_read(
    diptych: Diptych, monkeypatch: pytest.MonkeyPatch, component: str, problem: str
) -> None:
    monkeypatch.delattr(assembly, "load_model")
    result = diptych("generate", "--use", f"{component}={MY_RADIX_CACHE}", "Hello")
    assert result.exit_code == 2, result.output
    assert result.stderr == f"error: {component}={MY_RADIX_CACHE}: {problem}\n"
    checked = diptych("check", component, MY_RADIX_CACHE)
    assert checked.exit_code == 1, checked.output
    assert "1 of 1 clauses fail" in checked.stdout


def test_a_component_of_ones_own_takes_part(diptych: Diptych) -> None:
    arguments = ("generate", "--json", *QUESTIONS)
    (_, second), (_, expected) = (
        answers(diptych(*arguments, "--use", f"radix_cache={target}"))
        for target in (MY_RADIX_CACHE, "reference")
    )
    assert second["output_ids"] == expected["output_ids"]
    assert second["num_cached_tokens"] == expected["num_cached_tokens"] > 0
