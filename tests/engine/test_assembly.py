"""What an engine refuses before memory is allocated, and what it prints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.shared.config import EngineConfig, read_config
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.build.plan import resolve_config
from diptych.shared.engine.build.pools import print_memory
from diptych.shared.loading.model_path import ASSETS

MODEL = read_config(ASSETS / "tiny-dense")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"device": "cuda"}, r"device=cuda: this torch .* sees no CUDA GPU"),
        ({"device": "cuda:1"}, r"device=cuda:1: this torch .* sees no CUDA GPU"),
        ({"device": "mps"}, r"device=mps: this torch .* sees no Apple GPU"),
        ({"device": "tpu"}, r"device must be cpu, mps, cuda or cuda:N, got 'tpu'"),
        ({"device": "cpu", "context_len": MODEL.context_len + 1}, r"exceeds the model's \d+ positions"),
    ],
    ids=["cuda", "cuda:1", "mps", "tpu", "context"],
)
def test_what_this_computer_and_model_lack(
    flags: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        resolve_config(EngineConfig(**flags), MODEL)


def test_an_apple_gpu_has_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_config(EngineConfig(device="mps", context_len=16), MODEL).device == "mps"
    with pytest.raises(ValueError, match="Apple GPUs have no FP8"):
        resolve_config(EngineConfig(device="mps", kv_cache_dtype="fp8_e4m3"), MODEL)


def test_a_component_of_the_user_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine: pass\n")
    config = EngineConfig(model="tiny-dense", device="cpu", use={"sampler": f"{path}:Mine"})
    with pytest.raises(ValueError, match=r"^sampler=.*mine\.py:Mine: Mine is no subclass of diptych"):
        assemble(config)


def test_memory_is_printed_row_by_row(capfd: pytest.CaptureFixture[str]) -> None:
    memory: Any = SimpleNamespace(rows=lambda: {"weights": "1.5 GB", "KV cache": "20 GB"})
    print_memory(memory)
    rows = [line.split() for line in capfd.readouterr().err.splitlines()]
    assert rows == [["weights", "1.5", "GB"], ["KV", "cache", "20", "GB"]]


@pytest.mark.parametrize("flags", [{}, {"max_loras_per_batch": 2}, {"speculative": "ngram"}], ids=str)
def test_a_number_of_requests_that_does_not_fit_is_named(flags: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", max_running_requests=10**9, **flags)
    with pytest.raises(ValueError, match=r"^a table for max_running_requests=1000000000 needs 16384.0 GB, "):
        assemble(config)


def test_an_allocation_that_fails_names_the_model() -> None:
    class TooLarge:
        def __init__(self, *_: object) -> None:
            torch.empty(2**62, dtype=torch.uint8)

    config = EngineConfig(device="cpu", max_total_tokens=64)
    with pytest.raises(ValueError, match=r"^tiny-dense does not fit into memory: .*allocate") as raised:
        assemble(config, replace={"schedule_policy": TooLarge})
    assert "\n" not in str(raised.value)


def test_other_errors_stay_as_they_are() -> None:
    class Broken:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match=r"^on purpose$"):
        assemble(EngineConfig(device="cpu", max_total_tokens=64), replace={"schedule_policy": Broken})
