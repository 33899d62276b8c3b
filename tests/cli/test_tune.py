"""`diptych tune` asks for a GPU, and hands on what it is given."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import Result

from diptych.shared.config.quant_config import ONLINE

Diptych = Callable[..., Result]


def test_without_a_gpu_it_is_one_line(diptych: Diptych, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = diptych("tune", "--model", "Qwen3-8B")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: tune needs a CUDA GPU: it measures kernels there\n"


def test_models_and_numbers_of_tokens(diptych: Diptych, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def tune(configs: list[object], all_tokens: tuple[int, ...] | None, schemes: list[object]) -> Path:
        calls.append(([config.hidden_size for config in configs], all_tokens, schemes))
        return Path("TABLE.json")

    import_module = importlib.import_module
    fake = {"diptych.optimized.tune.tune": SimpleNamespace(tune=tune)}
    monkeypatch.setattr(
        importlib, "import_module", lambda name, *rest: fake.get(name) or import_module(name, *rest)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = diptych("tune", "--model", "Qwen3-8B,tiny-moe", "--tokens", "1,64")
    assert (result.exit_code, result.stdout) == (0, "written: TABLE.json\n"), result.output
    assert diptych("tune", "--model", "Qwen3-0.6B").exit_code == 0
    assert diptych("tune", "--model", "Qwen3-8B", "--quantization", "int4, fp8").exit_code == 0
    schemes = [ONLINE["int4"], ONLINE["fp8"]]
    assert calls == [([4096, 192], (1, 64), []), ([1024], None, []), ([4096], None, schemes)]
    result = diptych("tune", "--model", "Qwen3-8B", "--quantization", "int3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: no scheme int3; there are ")
    assert diptych("tune", "--model", "no-such-model").exit_code == 2
