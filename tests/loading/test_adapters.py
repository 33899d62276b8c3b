"""Folders of LoRA adapters that cannot be read: refused with a ValueError that names the adapter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych.shared.loading.lora_adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter

MODULE = "model.layers.0.self_attn.q_proj"


def write(folder: Path, rank: int = 2, **fields: Any) -> Path:
    config = {"peft_type": "LORA", "lora_alpha": 4, **fields}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    prefix = f"base_model.model.{MODULE}"
    tensors = {
        f"{prefix}.lora_A.weight": torch.zeros(rank, 8),
        f"{prefix}.lora_B.weight": torch.zeros(8, rank),
    }
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize(
    "path", ["a" * 5000, "~nouser/adapter", "/nowhere", "a\0b"], ids=["long", "no user", "no folder", "null"]
)
def test_folders_that_cannot_be_opened(path: str) -> None:
    with pytest.raises(ValueError, match="adapter 'mine': "):
        read_adapter(path, "mine")


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    write(tmp_path)
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"adapter 'mine': .* cannot be read: .*Permission denied"):
        read_adapter(tmp_path, "mine")


def test_a_nested_config(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / CONFIG_FILE).write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="adapter 'mine': "):
        read_adapter(tmp_path, "mine")


@pytest.mark.parametrize("pattern", [3, [1], {"q_proj": "4"}, {"q_proj": None}, {"(": 4}], ids=str)
def test_alpha_patterns(tmp_path: Path, pattern: Any) -> None:
    with pytest.raises(ValueError, match="adapter 'mine': alpha_pattern must map"):
        read_adapter(write(tmp_path, alpha_pattern=pattern), "mine")


def test_a_rank_of_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"adapter 'mine': .*{MODULE}.* is not supported"):
        read_adapter(write(tmp_path, rank=0), "mine")


@pytest.mark.parametrize(("pattern", "scale"), [(None, 2.0), ({}, 2.0), ({"q_proj": 1}, 0.5)], ids=str)
def test_what_is_valid_is_read(tmp_path: Path, pattern: Any, scale: float) -> None:
    assert read_adapter(write(tmp_path, alpha_pattern=pattern), "mine").modules[MODULE].scale == scale


@pytest.mark.parametrize("pattern", ["(.|.)*[!?]", "(.|.|.)*[A-Z]", "((a{1000}){1000}){1000}", "a" * 9000])
def test_a_pattern_that_never_ends(tmp_path: Path, pattern: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"adapter 'mine'.*alpha_pattern.*(takes longer|too long)"):
        read_adapter(write(tmp_path, alpha_pattern={pattern: 1}), "mine")
    assert time.monotonic() - start < 30
