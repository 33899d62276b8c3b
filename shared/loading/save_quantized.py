"""Writes a quantized checkpoint in the format of compressed-tensors, which other libraries read too.

A layer of FP8 or INT8 has `weight` and `weight_scale`, one of INT4 `weight_packed` (8 values in an int32, the
lowest first), `weight_scale` and `weight_shape`. Other weights stay as they are. Names are the canonical ones
of `diptych.shared.loading.weight_names`: experts have tensors of their own, also where the source packs
them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from diptych.shared.config import ModelConfig, QuantConfig, read_config
from diptych.shared.config.hf_config import read_json
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.loading.quantized_weights import quantized_layers
from diptych.shared.loading.safetensors_file import CHECKPOINT_FILES, INDEX_FILE, SINGLE_FILE, read_checkpoint
from diptych.shared.loading.weight_names import is_harmless
from diptych.shared.loading.weights import HEAD, Weights, iterate_weights
from diptych.shared.types.quant_scheme import QuantScheme

SCHEMES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "fp8": ({"num_bits": 8, "type": "float", "strategy": "channel"}, True, "float-quantized"),
    "int8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, True, "int-quantized"),
    "int4": ({"num_bits": 4, "type": "int", "strategy": "group"}, False, "pack-quantized"),
}
"""Format -> compressed-tensors' name of its weights, whether inputs are quantized too, and `format`."""

FILE_BYTES = 4 * 10**9
"""The size in bytes up to which tensors are collected for one file, which is also the memory needed."""


def save_quantized(
    source: Path,
    output: Path,
    method: str,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Quantize the checkpoint in `source` as with the flag `quantization`, and write it to `output`. Raises
    `ValueError` for a source that is quantized or damaged, and for an `output` that is not empty."""
    if method not in SCHEMES:
        raise ValueError(f"no format {method!r} of a checkpoint; there are {', '.join(SCHEMES)}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty; name a new folder")
    config = with_quantization(read_config(source), method)
    assert config.quantization is not None
    weights = _stored(iterate_weights(source, config, on_progress, device=device), config)
    output.mkdir(parents=True, exist_ok=True)
    _write_files(weights, _kept(source, config), output)
    for pattern in CHECKPOINT_FILES:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and file.name not in (INDEX_FILE, "config.json"):
                shutil.copyfile(file, output / file.name)
    description = read_json(source / "config.json")
    description["quantization_config"] = describe(config.quantization, method)
    (output / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def describe(config: QuantConfig, method: str) -> dict[str, Any]:
    """The quantization_config of config.json."""
    (_, scheme), *_ = config.targets
    weights, has_inputs, name = SCHEMES[method]
    weights = weights | {"symmetric": True, "dynamic": False}
    inputs = weights | {"strategy": "token", "dynamic": True} if has_inputs else None
    if scheme.group_size is not None:
        weights = weights | {"group_size": scheme.group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": name}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.shared_expert_gate$"],
    }


def _stored(weights: Weights, config: ModelConfig) -> Weights:
    """Tensors of `QuantScheme.tensors` as a checkpoint stores them."""
    layers = quantized_layers(config)
    for name, tensor in weights:
        module, _, suffix = name.rpartition(".")
        layer = layers.get(module)
        if layer is not None and suffix == "weight" and layer.scheme.is_packed:
            yield f"{module}.weight_packed", pack_int32(tensor, layer.scheme)
            yield f"{module}.weight_shape", torch.tensor([layer.out, layer.size])
        else:
            yield name, tensor


def pack_int32(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """uint8 [out, in / 2] as `pack_units` packs it -> int32 [out, in / 8]."""
    bytes_of_groups = weight.unflatten(1, (-1, scheme.unit(2 * weight.shape[1]) // 2))
    q = torch.cat((bytes_of_groups & 15, bytes_of_groups >> 4), dim=2).flatten(1).unflatten(1, (-1, 8))
    shifts = torch.arange(0, 32, 4, device=weight.device)
    return (q.to(torch.int64) << shifts).sum(2).to(torch.int32)  # the upper half becomes negative


def _kept(source: Path, config: ModelConfig) -> Weights:
    """The tensors that the model itself does not load: scales of KV, layers for drafting, the head of a
    reward model."""
    for name, info in read_checkpoint(source).items():
        if is_harmless(name, config) and name != HEAD:
            with safe_open(info.path, framework="pt", device="cpu") as file:
                yield name, file.get_tensor(name)


def _write_files(weights: Weights, kept: Weights, output: Path) -> None:
    """Write one file, or several files and their index."""
    files: list[str] = []
    where: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    total = num_bytes = 0

    def flush() -> None:
        files.append(f"model-{len(files) + 1:05}.safetensors")
        save_file(batch, output / files[-1], metadata={"format": "pt"})
        where.update(dict.fromkeys(batch, files[-1]))
        batch.clear()

    for source in (weights, kept):
        for name, tensor in source:
            batch[name] = tensor.to("cpu").contiguous()
            total += tensor.numel() * tensor.element_size()
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= FILE_BYTES:
                flush()
                num_bytes = 0
    if batch:
        flush()
    if len(files) == 1:
        (output / files[0]).rename(output / SINGLE_FILE)
        return
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (output / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
