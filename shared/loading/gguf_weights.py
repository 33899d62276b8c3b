"""Weights of a GGUF file under canonical names, dequantized to float32 as the package `gguf` does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.loading.gguf_names import IN_CONFIG, family_of, weight_parts
from diptych.shared.loading.gguf_reader import open_gguf
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import WeightPart, check_shapes

LINK = "weights.gguf"
"""The file, in a folder of `gguf_folder`."""

FLOATS = ("F32", "F16", "BF16")
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


def gguf_weights(
    path: Path,
    config: ModelConfig,
    on_progress: Callable[[int, int], None] | None = None,
    shards: Shards | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, one tensor at a time, or a rank's parts of them. Names, types and shapes are checked at
    the call: `ValueError`."""
    path = path.resolve()  # the other parts of a split file are beside it
    tensors = [tensor for tensor in open_gguf(path).tensors.values() if tensor.name not in IN_CONFIG]
    _check_types(tensors, path)
    parts = [weight_parts(tensor.name, shape_of(tensor), config, str(path)) for tensor in tensors]
    check_shapes({part.name: part.shape for own in parts for part in own}, config, str(path))
    _tell_dequantized({tensor.tensor_type.name for tensor in tensors})
    return _stream(list(zip(tensors, parts)), path, config, on_progress, shards)


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
    entries: list[tuple[Any, list[WeightPart]]],
    path: Path,
    config: ModelConfig,
    on_progress: Callable[[int, int], None] | None,
    shards: Shards | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    family = family_of(config)
    num_bytes, num_bytes_read = sum(int(tensor.n_bytes) for tensor, _ in entries), 0
    for tensor, parts in entries:
        num_bytes_read += int(tensor.n_bytes)
        if shards is None or any(shards.local_names(part.name) for part in parts):
            values = dequantized(tensor)
            if not torch.isfinite(values).all():
                raise ValueError(f"{path}: {tensor.name} has values that are NaN or infinite; it is damaged")
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
