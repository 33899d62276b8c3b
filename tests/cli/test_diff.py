"""`diptych diff`: its options, its verdict and the exit status."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.commands.diff import parse_flags, parse_side, runnable_components

Diptych = Callable[..., Result]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def bad_attention(tmp_path: Path) -> str:
    code = """
        from diptych.reference.attention import TorchAttention

        class Bad(TorchAttention):
            def run(self, q, layer, plan, **kv):
                output = super().run(q, layer, plan, **kv)
                return output.mul_(1.01) if layer.layer_id == 2 else output
    """
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(code))
    return f"{file}:Bad"


def test_two_configurations_of_one_panel(diptych: Diptych) -> None:
    flags = "page_size=4,chunked-prefill-size=7,disable_radix_cache=true"
    result = diptych("diff", "--b-flags", flags, "-n", "3", "--prompt", "What is 12 + 30?")
    assert result.exit_code == 0, result.output
    for expected in ("no divergence", f"reference, {flags}", "tiny-dense", "float32", "attention", "logits"):
        assert expected in result.stdout
    # 17 prompt tokens in chunks of a page, then two more tokens.
    assert "in 3 steps of A and 7 of B" in result.stdout
    assert "the batches part at step 1" in result.stdout


def test_default_compares_the_optimized_components_of_the_device(diptych: Diptych) -> None:
    result = diptych("diff", "--device", "cpu", "-n", "2", "--prompt", "What is 12 + 30?")
    assert result.exit_code == 0, result.output
    text = "".join(result.stdout.split())
    assert "Breference,scheduler=optimized,schedule_policy=optimized,prefill_adder=optimized," in text
    assert ",attention=optimized" not in text
    assert runnable_components("cuda:1") == "optimized"


def test_a_divergence_is_shown_and_written(diptych: Diptych, tmp_path: Path, bad_attention: str) -> None:
    out = tmp_path / "out"
    result = diptych("diff", "--b", f"attention={bad_attention}", "--steps", "1", "--out", str(out))
    assert result.exit_code == 1, result.output
    rows = [line.split(None, 1) for line in result.stdout.splitlines() if line.strip()]
    shown = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert shown["step"] == "1 (EXTEND)"
    assert shown["layer"] == "2"
    assert shown["op"] == "self_attn.attention (attention)"
    assert shown["request"] == "prompt-0, position 0 (prompt token 1)"
    assert shown["B"] != shown["A"]
    assert sorted(path.name for path in out.iterdir()) == ["divergence.safetensors", "report.html"]
    assert "First divergence" in (out / "report.html").read_text()


def test_a_bad_component_may_be_a(diptych: Diptych, bad_attention: str) -> None:
    arguments = ["--a", f"reference,attention={bad_attention}", "--b", f"attention={bad_attention}"]
    result = diptych("diff", *arguments, "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "the limit of steps ended it" in result.stdout


def test_a_model_without_tokenizer_gets_random_prompts(diptych: Diptych, tmp_path: Path) -> None:
    config = json.loads((ASSETS / "tiny-dense" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    options = ["--model", str(tmp_path), "--load-format", "dummy", "-n", "2", "--teacher-forced"]
    result = diptych("diff", *options, "--b-flags", "page_size=2")
    assert result.exit_code == 0, result.output
    assert "3, at most 2 new tokens each, greedy, B with A's tokens" in result.stdout
    assert "65 tokens compared, in 2 steps of A and 2 of B" in result.stdout  # 5 + 17 + 40 and 3 more
    result = diptych("diff", *options, "--prompt", "Hello")
    assert result.exit_code == 2
    assert "has no tokenizer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--b", "fastest"], "a side is one of reference, optimized"),
        (["--b", "reference,optimized"], "a side is one of reference, optimized"),
        (["--b", "no_such=reference"], "unknown component 'no_such'"),
        (["--b", "sampler=fastest"], "choose one of reference"),
        (["--b", "sampler=no_such_file.py:Sampler"], "no such file"),
        (["--b-flags", "page_size"], "given as flag=value"),
        (["--b-flags", "pagesize=4"], "unknown flag pagesize; the flags are "),
        (["--b-flags", "page_size=four"], "page_size must be an integer >= 1, got 'four'"),
        (["--b-flags", "cuda_graph_bs=1:2"], "separated by '+', got '1:2'"),
        (["--b-flags", "enable_mixed_chunk=yes"], "enable_mixed_chunk must be True or False"),
        (["--a-flags", "model=tiny-moe"], "model is not a flag of one side"),
        (["--b-flags", "page_size=0"], "page_size must be"),
        (["--b-flags", "chunked_prefill_size=0"], "an integer >= 1, or -1 to never cut a prompt, got 0"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--b-flags", "context_len=8"], "the context of 8 tokens"),
        (["--max-kl", "1"], "--max-kl needs two precisions or models"),
        (["--b-model", "tiny-moe", "--graphs"], "--graphs does not apply to servers, or to two precisions"),
        (["--b", "http://127.0.0.1:9"], "no server answers"),
        (["--b", "http://127.0.0.1:9", "--max-kl", "1"], "--max-kl does not apply to servers"),
        (["--b-model", "tiny-moe"], "A and B must have one model shape"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(diptych: Diptych, arguments: list[str], message: str) -> None:
    result = diptych("diff", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_a_folder_that_cannot_be_made_is_refused_before_an_engine_is(
    diptych: Diptych, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    result = diptych("diff", "--model", "no-such-model", "--out", str(tmp_path / "file" / "out"))
    assert result.exit_code == 2
    assert result.stderr == f"error: cannot write into {tmp_path / 'file'}: Not a directory\n"
    result = diptych("diff", "--model", "no-such-model", "--out", str(tmp_path / "a" / "b"))
    assert "no model" in result.stderr
    assert not (tmp_path / "a").exists()


def test_sides_and_flags_are_parsed() -> None:
    assert parse_side("reference") == {"panel": "reference", "use": {}}
    assert parse_side("optimized, sampler=reference") == {
        "panel": "optimized",
        "use": {"sampler": "reference"},
    }
    assert parse_side("sampler=mine.py:Sampler,moe=reference")["use"] == {
        "sampler": "mine.py:Sampler",
        "moe": "reference",
    }
    text = "page_size=4, chunked_prefill_size=none, mem_fraction_static=0.5, eviction_policy=lfu"
    assert parse_flags(f"{text},enable-mixed-chunk=TRUE,device=cuda:1") == {
        "page_size": 4,
        "chunked_prefill_size": None,
        "mem_fraction_static": 0.5,
        "eviction_policy": "lfu",
        "enable_mixed_chunk": True,
        "device": "cuda:1",
    }
    assert parse_flags("cuda_graph_bs=1+2+4,disable_cuda_graph=true") == {
        "cuda_graph_bs": (1, 2, 4),
        "disable_cuda_graph": True,
    }
    assert parse_flags("chunked-prefill-size=-1") == {"chunked_prefill_size": None}
    assert parse_flags("chunked_prefill_size=64") == {"chunked_prefill_size": 64}
    assert parse_flags("") == {}


def test_two_precisions_are_measured(diptych: Diptych, tmp_path: Path) -> None:
    options = ["--prompt", "What is 12 + 30?", "-n", "2", "--b-flags", "quantization=int4"]
    result = diptych("diff", *options, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    for expected in ("loses most", "KL divergence", "same best token", "perplexity", "quantization=int4"):
        assert expected in result.stdout
    assert "loses most" in (tmp_path / "out" / "report.html").read_text()
    result = diptych("diff", *options, "--max-kl", "1e-9")
    assert result.exit_code == 1
    assert "is above --max-kl 1e-09" in result.stdout
