"""`diptych bench quantization`, and the bytes of quantized weights in the bound of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diptych.shared.config import read_config
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.tools.bench.step_cost import step_cost
from diptych.shared.tools.cli import app


def test_every_layer_and_scheme_has_a_time(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    args = ["--model", "tiny-dense", "--tokens", "1,3", "--schemes", "fp8,int8", "--panel", "reference"]
    result = CliRunner().invoke(app, ["bench", "quantization", *args, "-o", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["results"]
    assert [(row["case"]["layer"], row["case"]["num_tokens"]) for row in rows[:3]] == [
        ("qkv", 1),
        ("qkv", 3),
        ("o", 1),
    ]
    assert len(rows) == 8
    assert all(set(row["microseconds"]) == {"16 bits", "fp8", "int8"} for row in rows)
    assert "down" in result.output


@pytest.mark.parametrize("command", [["bench", "quantization", "--schemes"], ["tune", "--quantization"]])
def test_an_unknown_scheme_is_named(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "fp7", "--model", "tiny-dense"])
    assert result.exit_code != 0
    assert "no scheme fp7; there are fp8" in f"{result.output} {result.exception}"


def test_the_bound_counts_the_bytes_of_quantized_weights() -> None:
    config = read_config(ASSETS / "tiny-dense")
    plain = step_cost(config, [100], [1], torch.bfloat16)
    fp8 = step_cost(with_quantization(config, "fp8"), [100], [1], torch.bfloat16)
    head = {phase.name: phase.num_bytes for phase in plain.phases}["lm_head"]
    ratio = (fp8.weight_bytes - head) / (plain.weight_bytes - head)
    assert 0.5 < ratio < 0.52
    assert fp8.kv_bytes == plain.kv_bytes
    assert fp8.flops < plain.flops
