"""Memory of loading beyond the model: on the CPU one shard and a little more, on the device a little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych.shared.config import parse_config
from diptych.shared.loading.weights import dummy_weights
from diptych.shared.tools.conformance.oracles.configs import CONFIGS

GIB = 2**30
SHAPE = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
MOE = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 4, "moe_intermediate_size": 768}
MODELS: dict[str, dict[str, Any]] = {
    # An embedding and a head of 1 GiB each.
    "untied": {**CONFIGS["llama-linear"], **SHAPE},
    # One of 1.2 GiB, for both.
    "tied": {**CONFIGS["qwen3-layer-types"], **SHAPE, "vocab_size": 155000, "num_hidden_layers": 1},
    "experts": {**CONFIGS["qwen3-moe"], **SHAPE, **MOE, "num_experts": 64, "num_experts_per_tok": 8},
}
MODELS["tied"]["layer_types"] = ["full_attention"]


def write_checkpoint(folder: Path, hf_config: dict[str, Any], shard_bytes: int) -> int:
    """Seeded weights in files of about `shard_bytes`; the size of the largest."""
    (folder / "config.json").write_text(json.dumps(hf_config))
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    largest = size = 0

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in shard.items()}, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in dummy_weights(parse_config(hf_config), device="cuda"):
        num_bytes = tensor.numel() * tensor.itemsize
        if shard and size + num_bytes > shard_bytes:
            write()
            size = 0
        shard[name] = tensor
        size += num_bytes
        largest = max(largest, size)
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return largest


def probe(folder: Path, load_format: str, *more: str) -> dict[str, float]:
    script = Path(__file__).with_name("load_probe.py")
    command = [sys.executable, str(script), str(folder), load_format, "cuda", *more]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    print(folder.name, load_format, {name: round(value / GIB, 3) for name, value in found.items()}, found)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_loading_a_checkpoint(name: str, tmp_path: Path) -> None:
    largest_shard = write_checkpoint(tmp_path, MODELS[name], GIB)
    found = probe(tmp_path, "auto")
    assert found["host"] < largest_shard + GIB
    assert found["device"] < found["weights"] + GIB


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    """A GPU with little room has no embedding twice."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    found = probe(tmp_path, "dummy")
    assert found["device"] < found["weights"] + 2 * GIB
    found = probe(tmp_path, "dummy", "1000000")
    assert found["device"] < found["weights"] + GIB
