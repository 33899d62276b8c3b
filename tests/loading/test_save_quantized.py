"""Quantized checkpoints of `diptych quantize`: the weights of `--quantization`, for us and for others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diptych.shared.config import read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading import save_quantized as module
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.save_quantized import SCHEMES, pack_int32, save_quantized
from diptych.shared.tools.cli import app
from diptych.shared.types.quant_scheme import QuantScheme

FLAGS = {"panel": "reference", "device": "cpu", "max_total_tokens": 2048}


@pytest.mark.parametrize(
    ("model", "method"),
    [("tiny-dense", "int8"), ("tiny-dense", "int4"), ("tiny-moe", "fp8"), ("tiny-hybrid", "fp8")],
)
def test_a_checkpoint_has_the_weights_of_the_flag(
    model: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "int8":
        monkeypatch.setattr(module, "FILE_BYTES", 10**6)  # several files and their index
    save_quantized(resolve_model_path(model), tmp_path / "out", method)
    assert (tmp_path / "out" / "model.safetensors").exists() == (method != "int8")
    flags = {**FLAGS, "kv_cache_dtype": "fp8_e4m3"}
    ours = dict(LLM(str(tmp_path / "out"), **flags).assembly.model.named_parameters())
    expected = dict(LLM(model, quantization=method, **flags).assembly.model.named_parameters())
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(ours[name].view(torch.uint8), weight.view(torch.uint8)), name


@pytest.mark.full
@pytest.mark.parametrize("method", SCHEMES)
def test_transformers_reads_the_checkpoint(method: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_quantized(resolve_model_path("tiny-dense"), tmp_path / "out", method)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    llm = LLM(str(tmp_path / "out"), **FLAGS)
    prompt = llm.chat_prompt([{"role": "user", "content": "Mara is a baker. What is Mara's job?"}])
    output = llm.generate(prompt, max_tokens=8, temperature=0, return_logprob=True, logprob_start_len=0)
    ids = torch.tensor([prompt + output.output_ids])
    with torch.inference_mode():
        logprobs = theirs(ids).logits[0, :-1].log_softmax(1)
    expected = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    found = [token.logprob for token in output.input_logprobs[1:] + output.output_logprobs]
    # float32 sums in another order, which may round an input to another 8-bit value
    assert found == pytest.approx(expected, abs=1e-4 if method == "int4" else 0.05)


def test_int4_is_packed_with_the_lowest_value_first() -> None:
    values = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    low, high = values.unflatten(1, (-1, 2, 8)).unbind(2)
    in_memory = (low | high << 4).flatten(1)  # input k and k + 8 of a group of 16 share a byte
    packed = pack_int32(in_memory, QuantScheme("int4", group_size=16))
    assert packed.dtype == torch.int32
    assert [hex(number & 0xFFFFFFFF) for number in packed[0].tolist()] == ["0x76543210", "0xfedcba98"] * 2


def test_others_understand_the_description(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    save_quantized(resolve_model_path("tiny-moe"), tmp_path / "out", "int4")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(written).config_groups["group_0"].weights
    assert (read.num_bits, read.group_size) == (4, 32)
    config = read_config(tmp_path / "out").quantization
    assert config is not None
    assert config.scheme_of("model.layers.0.mlp.gate") is None, "a router"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda tmp: ["tiny-dense", "--format", "int5", "-o", f"{tmp}/new"], "no format 'int5'"),
        (lambda tmp: ["tiny-dense", "--format", "int4", "-o", str(tmp)], "exists and is not empty"),
        (lambda tmp: ["nowhere", "--format", "int4", "-o", f"{tmp}/new"], "no model 'nowhere'"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: Callable[[Path], list[str]], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["quantize", *arguments(tmp_path)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["quantize", "tiny-dense", "--format", "int4", "--output", str(tmp_path / "a")])
    assert done.exit_code == 0, done.output
    assert "38% of 7.5 MB" in done.stdout
    again = runner.invoke(
        app, ["quantize", str(tmp_path / "a"), "--format", "fp8", "-o", str(tmp_path / "b")]
    )
    assert (again.exit_code, "already quantized" in again.stderr) == (2, True)


def test_quantized_built_in_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model_path("tiny-dense-int4")
    assert folder.parent == tmp_path / "diptych"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model_path("tiny-dense-int4") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "it is written once"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing else is left"
    llm = LLM("tiny-dense-int4", **FLAGS)
    answer = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], temperature=0, max_tokens=16)
    assert "42" in answer.text
    with pytest.raises(ValueError, match="no model 'tiny-dense-int5'"):
        resolve_model_path("tiny-dense-int5")


def test_a_version_that_another_process_has_written_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model_path("tiny-moe-fp8")
    (moved := tmp_path / "other").mkdir()
    folder.rename(moved / "done")

    def meanwhile(source: Path, output: Path, method: str) -> None:
        save_quantized(source, output, method)
        (moved / "done").rename(folder)

    monkeypatch.setattr(module, "save_quantized", meanwhile)
    assert resolve_model_path("tiny-moe-fp8") == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
