"""The dtype of the KV pool, and the scales of an FP8 pool, read from a checkpoint.

Checkpoints name the scales of a layer in four ways: `self_attn.k_scale` and `v_scale`, the same behind
`k_proj.` and `v_proj.`, `k_proj.output_scale` and `v_proj.output_scale`, and, in old ones, `kv_scale` for
both. Each has one element. compressed-tensors announces them by `kv_cache_scheme` in config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.hf_config import config_path, read_json
from diptych.shared.config.hf_multimodal import language_name
from diptych.shared.loading.gguf_weights import LINK as GGUF_LINK
from diptych.shared.loading.safetensors_file import QUANTIZED_DTYPES, SUPPORTED_DTYPES, read_checkpoint
from diptych.shared.loading.weight_names import KV_SCALE
from diptych.shared.types.attention import FP8, KVScales

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def kv_cache_of(
    folder: Path, model_config: ModelConfig, config: EngineConfig
) -> tuple[torch.dtype, list[KVScales] | None]:
    """The dtype of a KV pool with kv_cache_dtype=fp8_e4m3 or fp8_e5m2, and the scales of its layers. None: 1.
    Raises `ValueError` for scales that are missing or that an FP8 pool cannot use."""
    dtype = FP8 if config.kv_cache_dtype == "fp8_e4m3" else torch.float8_e5m2
    if config.load_format == "dummy" or (folder / GGUF_LINK).is_file():  # which has no scales
        return dtype, None
    scales = read_kv_scales(folder, model_config)
    if scales is not None and model_config.mla is not None:
        scales = [KVScales(each.k, each.k) for each in scales]  # V is part of the row
    return dtype, scales


def read_kv_scales(folder: Path, model_config: ModelConfig) -> list[KVScales] | None:
    """The scales of all layers; None if the checkpoint has none."""
    quantization = read_json(config_path(folder)).get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme")
    if scheme is not None:
        _check_scheme(scheme, folder)
    found: dict[int, dict[str, float]] = {}
    for name, info in read_checkpoint(folder, SUPPORTED_DTYPES + QUANTIZED_DTYPES).items():
        match = KV_SCALE.fullmatch(language_name(name))
        if match is None:
            continue
        scale = _read_scale(info.path, name)
        which = "kv" if match[2] else match[3] or match[4] or match[5]
        found.setdefault(int(match[1]), {}).update(dict.fromkeys(which, scale))
    if not found and scheme is None:
        return None
    for layer_id in model_config.kv_layers:
        for which in "kv":
            if which not in found.get(layer_id, {}):
                raise ValueError(
                    f"{folder}: model.layers.{layer_id}.self_attn.{which}_scale is missing: a checkpoint "
                    "for an FP8 KV cache has a scale of K and of V for each layer, or none at all"
                )
    return [KVScales(**found[layer_id]) for layer_id in model_config.kv_layers]


def _read_scale(path: Path, name: str) -> float:
    with safe_open(path, framework="pt", device="cpu") as file:
        tensor = file.get_tensor(name)
    if tensor.numel() != 1:
        raise ValueError(
            f"{path}: {name} has shape {tuple(tensor.shape)}; supported is one scale for a layer"
        )
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{path}: {name} is {scale}; a scale is a finite number above 0")
    return scale


def _check_scheme(scheme: Any, folder: Path) -> None:
    """Raise `ValueError` for a kv_cache_scheme other than FP8 with one scale for each layer."""
    if not isinstance(scheme, Mapping):
        raise ValueError(f"{folder}: kv_cache_scheme is {scheme!r}; it must map names to settings")
    wrong = {key: scheme[key] for key, value in SCHEME.items() if scheme.get(key, value) != value}
    if wrong:
        raise ValueError(
            f"{folder}: kv_cache_scheme has {wrong}; supported is {SCHEME} (kv_cache_dtype=fp8_e4m3)"
        )
