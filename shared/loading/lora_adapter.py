"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import regex
import torch

from diptych.shared.config import ModelConfig
from diptych.shared.config.families import GROUPED
from diptych.shared.config.hf_multimodal import language_name
from diptych.shared.loading.safetensors_file import read_header
from diptych.shared.loading.weight_names import canonical_parts, expected_shapes
from diptych.shared.types.lora import LoraAdapter, LoraWeights
from diptych.shared.types.stops import MAX_REGEX_SIZE, regex_size

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that take adapters: those of attention and of dense MLPs,"""
LINEAR_TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""and those of linear attention. Qwen3-Next's GROUPED layers are two of these each."""

PATTERN_SECONDS = 1.0
"""For all patterns of an adapter on all its modules: a file from elsewhere can have one that never ends."""
MAX_PATTERN_CHARS = 8192

_PREFIX = "base_model.model."
_NAME = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = {  # field of adapter_config.json -> values without effect
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "alora_invocation_tokens": ([], None),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}


def adaptable_modules(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name of each linear layer that takes adapters -> (out_features, in_features)."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in expected_shapes(config).items()
        if name.endswith(tuple(f".{target}.weight" for target in (*TARGETS, *LINEAR_TARGETS)))
        and "experts." not in name
    }


def fit_model(adapter: LoraAdapter, config: ModelConfig) -> LoraAdapter:
    """The adapter with the names of the model's linear layers: one of several merged layers becomes as many,
    with the same A, and with their rows of B. Raises `ValueError` if their number is wrong."""
    if config.linear_attention is None:
        return adapter
    modules = {}
    for name, weights in adapter.modules.items():
        parts = canonical_parts(f"{name}.weight", tuple(weights.b.shape), config)
        names = GROUPED.get(name.rpartition(".")[2], ())
        sizes = [config.linear_attention.projections.get(each, 0) for each in names]
        if len(parts) < len(names) and all(sizes):
            raise ValueError(
                f"adapter {adapter.name!r}: lora_B {list(weights.b.shape)} does not fit {name} "
                f"{[sum(sizes), config.hidden_size]}"
            )
        for part in parts:
            own = part.name.removesuffix(".weight")
            modules[own] = replace(weights, b=part.of(weights.b))
    return replace(adapter, modules=modules)


def check_modules(adapter: LoraAdapter, shapes: Mapping[str, tuple[int, ...]], max_rank: int) -> None:
    """Raise `ValueError` for an adapter that does not fit the model's modules, or has too high a rank."""
    unknown = [name for name in adapter.modules if name not in shapes]
    if unknown:
        raise ValueError(
            f"adapter {adapter.name!r} changes {len(unknown)} modules that take no adapters here: "
            f"{', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''}; those that do are "
            f"{', '.join(TARGETS)} of attention and of dense MLPs, {', '.join((*LINEAR_TARGETS, *GROUPED))} "
            "of linear attention"
        )
    for name, weights in adapter.modules.items():
        rank, found = weights.a.shape[0], (weights.b.shape[0], weights.a.shape[1])
        if found != shapes[name] or weights.b.shape[1] != rank:
            raise ValueError(
                f"adapter {adapter.name!r}: lora_A {list(weights.a.shape)} and lora_B "
                f"{list(weights.b.shape)} do not fit {name} {list(shapes[name])}"
            )
    if adapter.rank > max_rank:
        raise ValueError(
            f"adapter {adapter.name!r} has rank {adapter.rank}; this engine takes at most {max_rank} "
            f"(max_lora_rank)"
        )


def read_adapter(folder: str | Path, name: str) -> LoraAdapter:
    """The adapter of a folder. Raises `ValueError` for files that cannot be read, and for unsupported
    settings, with the field's name."""
    try:
        path = Path(folder).expanduser()
        config = _read_config(path / CONFIG_FILE, name)
        tensors = _read_tensors(path / WEIGHTS_FILE, name)
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user, JSON that is nested too deeply
        raise ValueError(f"adapter {name!r}: {folder} cannot be read: {error}") from None
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is None or tensor.dim() != 2 or tensor.numel() == 0:
            raise ValueError(
                f"adapter {name!r}: {key} {list(tensor.shape)} is not supported; tensors are "
                f"{_PREFIX}MODULE.lora_A.weight and lora_B.weight"
            )
        parts.setdefault(match.group(1), {})[match.group(2)] = tensor
    alone = [module for module, found in parts.items() if len(found) != 2]
    if alone or not parts:
        raise ValueError(f"adapter {name!r}: {alone[0] if alone else folder} lacks lora_A or lora_B")
    end = time.monotonic() + PATTERN_SECONDS
    try:
        modules = {
            language_name(module): LoraWeights(
                found["A"], found["B"], scale_of(config, module, found["A"].shape[0], end)
            )
            for module, found in sorted(parts.items())
        }
    except TimeoutError:
        raise ValueError(f"adapter {name!r}: alpha_pattern takes longer than {PATTERN_SECONDS:g} s") from None
    return LoraAdapter(name, content_id_of(modules), modules)


def scale_of(config: Mapping[str, Any], module: str, rank: int, end: float) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA. `alpha_pattern` may have another alpha for the module.
    `rank_pattern` may have another rank, which is that of its weights. Raises `TimeoutError` at `end`."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        left = max(end - time.monotonic(), 1e-6)
        if regex.fullmatch(_at_the_end(pattern), module, timeout=left):  # PEFT's rule: the first to match
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _at_the_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"


def content_id_of(modules: Mapping[str, LoraWeights]) -> str:
    """A digest of names, scales, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, weights in sorted(modules.items()):
        digest.update(repr((name, weights.scale)).encode())
        for tensor in (weights.a, weights.b):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_config(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"adapter {name!r}: {path.parent} has no {CONFIG_FILE}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"adapter {name!r}: {path} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"adapter {name!r}: peft_type is {kind!r}; only LORA is supported")
    if not isinstance(config.get("lora_alpha"), (int, float)):
        raise ValueError(f"adapter {name!r}: lora_alpha must be a number, got {config.get('lora_alpha')!r}")
    _check_alpha_pattern(config.get("alpha_pattern"), name)
    for field, harmless in _UNSUPPORTED.items():
        if config.get(field) not in harmless:
            raise ValueError(f"adapter {name!r}: {field}={config[field]!r} is not supported")
    return config


def _check_alpha_pattern(pattern: Any, name: str) -> None:
    message = f"adapter {name!r}: alpha_pattern must map regexes of modules to numbers, got {pattern!r}"
    if pattern is None:
        return
    if not isinstance(pattern, dict) or not all(isinstance(each, (int, float)) for each in pattern.values()):
        raise ValueError(message)
    if sum(map(len, pattern)) > MAX_PATTERN_CHARS or sum(map(regex_size, pattern)) > MAX_REGEX_SIZE:
        raise ValueError(f"adapter {name!r}: the regexes of alpha_pattern are too long or repeat too often")
    try:
        for each in pattern:
            regex.compile(_at_the_end(each))
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{message}: {error}") from None


def _read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"adapter {name!r}: {path.parent} has no {WEIGHTS_FILE}")
    read_header(path)  # refuses what is damaged
    return load_file(path)
