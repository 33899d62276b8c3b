"""Weights of a GGUF file under canonical names: dequantized to float32 as the package `gguf` does, or, where
`kept_quantized` has chosen so, in the blocks of the file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.shared.config import ModelConfig, QuantConfig
from diptych.shared.config.quant_config import ALL_LINEAR
from diptych.shared.loading.gguf_names import IN_CONFIG, family_of, weight_parts
from diptych.shared.loading.gguf_reader import open_gguf
from diptych.shared.loading.quantize import MERGED
from diptych.shared.loading.quantized_weights import Layer, parts_of_rank, quantized_layers
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import WeightPart, check_shapes
from diptych.shared.types.quant_scheme import QuantScheme

LINK = "weights.gguf"
"""The file, in a folder of `gguf_folder`."""

FLOATS = ("F32", "F16", "BF16")
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
KEPT = {"Q8_0": QuantScheme("int8", group_size=32), "Q4_0": QuantScheme("int4", group_size=32)}
"""Types that kernels multiply: a scale in float16 and 32 values. In Q4_0 they are 0 to 15 with the zero point
8, and value i shares a byte with value i + 16, as in `QuantScheme`."""


def as_in_file(config: ModelConfig, folder: Path) -> ModelConfig:
    """A model's config with the linear layers of its GGUF file that stay quantized."""
    link = folder / LINK
    if config.quantization is not None or not link.is_file():
        return config
    return replace(config, quantization=kept_quantized(link, config))


def kept_quantized(path: Path, config: ModelConfig) -> QuantConfig | None:
    """Which linear layers stay as they are in the file: those of a type in KEPT, if all that one layer is
    made of are of this type. None: there are none. Experts are dequantized."""
    types: dict[str, str] = {}
    merged: dict[str, set[str]] = {}
    for tensor in open_gguf(path.resolve()).tensors.values():
        if tensor.name.endswith(".weight") and tensor.name not in IN_CONFIG and len(tensor.shape) == 2:
            for part in weight_parts(tensor.name, shape_of(tensor), config, str(path)):
                types[name := part.name.removesuffix(".weight")] = tensor.tensor_type.name
                merged.setdefault(MERGED.sub("merged", name), set()).add(types[name])
    kept = {
        name: kind
        for name, kind in types.items()
        if kind in KEPT and name.startswith("model.layers.") and len(merged[MERGED.sub("merged", name)]) == 1
    }
    if not kept:
        return None
    most = Counter(kept.values()).most_common(1)[0][0]
    others = tuple((name, KEPT[kind]) for name, kind in kept.items() if kind != most)
    ignored = tuple(name for name in types if name not in kept)
    return QuantConfig("gguf", ((ALL_LINEAR, KEPT[most]), *others), ("experts", *ignored))


def gguf_weights(
    path: Path,
    config: ModelConfig,
    on_progress: Callable[[int, int], None] | None = None,
    shards: Shards | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, one tensor at a time, or a rank's parts of them; of layers that stay quantized the tensors
    of their scheme. Names, types and shapes are checked at the call: `ValueError`."""
    path = path.resolve()  # the other parts of a split file are beside it
    tensors = [tensor for tensor in open_gguf(path).tensors.values() if tensor.name not in IN_CONFIG]
    _check_types(tensors, path)
    parts = [weight_parts(tensor.name, shape_of(tensor), config, str(path)) for tensor in tensors]
    check_shapes({part.name: part.shape for own in parts for part in own}, config, str(path))
    layers = quantized_layers(config) if config.quantization is not None else {}
    entries = [
        (tensor, own, [layers.get(part.name.removesuffix(".weight")) for part in own])
        for tensor, own in zip(tensors, parts)
    ]
    for each in layers.values():
        each.part(shards)
    for tensor, _, own in entries:
        kind = tensor.tensor_type.name
        for layer in own:
            if layer is not None and layer.scheme != KEPT.get(kind):
                raise ValueError(f"{path}: {tensor.name} is of type {kind}; the model has {layer.scheme}")
    _tell_dequantized({tensor.tensor_type.name for tensor, _, own in entries if None in own})
    return _stream(entries, path, config, on_progress, shards)


def _check_types(tensors: Iterable[Any], path: Path) -> None:
    for tensor in tensors:
        kind = tensor.tensor_type.name
        if kind not in FLOATS + QUANTIZED:
            known = ", ".join(FLOATS + QUANTIZED)
            raise ValueError(f"{path}: {tensor.name} is of type {kind}; supported are {known}")


def shape_of(tensor: Any) -> tuple[int, ...]:
    """GGUF counts dimensions from the last one."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _stream(
    entries: list[tuple[Any, list[WeightPart], list[Layer | None]]],
    path: Path,
    config: ModelConfig,
    on_progress: Callable[[int, int], None] | None,
    shards: Shards | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    family = family_of(config)
    num_bytes, num_bytes_read = sum(int(tensor.n_bytes) for tensor, *_ in entries), 0
    for tensor, parts, layers in entries:
        num_bytes_read += int(tensor.n_bytes)
        if layers and layers[0] is not None:
            stored = blocks_of(tensor, layers[0].scheme)
            _refuse_infinite(stored["weight_scale"], tensor, path)
            for part, layer in zip(parts, layers):
                assert layer is not None, part.name
                own = {suffix: part.of(value) for suffix, value in stored.items()}
                if family.is_permuted:
                    own = {suffix: unpermuted(value, part.name, config) for suffix, value in own.items()}
                if shards is None or shards.local_names(part.name):
                    yield from parts_of_rank(layer, own, shards)
        elif shards is None or any(shards.local_names(part.name) for part in parts):
            values = dequantized(tensor)
            _refuse_infinite(values, tensor, path)
            if tensor.name.endswith("norm.weight"):
                values -= family.norm_offset
            for part in parts:
                value = part.of(values)
                if family.is_permuted:
                    value = unpermuted(value, part.name, config)
                if shards is None:
                    yield part.name, value
                else:
                    for local_name in shards.local_names(part.name):
                        yield local_name, shards.cut(part.name, value)
        if on_progress is not None:
            on_progress(num_bytes_read, num_bytes)


def _refuse_infinite(values: torch.Tensor, tensor: Any, path: Path) -> None:
    if not torch.isfinite(values).all():
        raise ValueError(f"{path}: {tensor.name} has values that are NaN or infinite; it is damaged")


def blocks_of(tensor: Any, scheme: QuantScheme) -> dict[str, torch.Tensor]:
    """A matrix of a type in KEPT as the tensors of its scheme."""
    assert scheme.group_size is not None
    num_rows, num_inputs = shape_of(tensor)
    blocks = torch.tensor(tensor.data).view(num_rows, num_inputs // scheme.group_size, -1)  # a copy
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    values = blocks[..., 2:].flatten(1)
    return {"weight": values if scheme.is_packed else values.view(torch.int8), "weight_scale": scale}


def dequantized(tensor: Any) -> torch.Tensor:
    """float32 [..., out, in]."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).reshape(shape_of(tensor))
    return torch.tensor(values, dtype=torch.float32)  # a copy: the file's memory is read-only


# --8<-- [start:unpermuted]
def unpermuted(values: torch.Tensor, name: str, config: ModelConfig) -> torch.Tensor:
    """q and k with one half of each head behind the other; anything else as it is."""
    if ".self_attn.q_proj." not in name and ".self_attn.k_proj." not in name:
        return values
    num_heads = config.num_qo_heads if ".q_proj." in name else config.num_kv_heads
    pairs = values.unflatten(0, (num_heads, config.head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(values.shape)


# --8<-- [end:unpermuted]


def _tell_dequantized(kinds: set[str]) -> None:
    found = [kind for kind in QUANTIZED if kind in kinds]
    if found:
        print(
            f"weights in {', '.join(found)}: no kernel multiplies them, so they are dequantized when they "
            "are loaded; they take the memory of an unquantized model",
            file=sys.stderr, flush=True,
        )  # fmt: skip
