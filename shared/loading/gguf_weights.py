"""Weights of a GGUF file under canonical names, dequantized to float32 as the package `gguf` does.

In a Llama file the rows of q and k are permuted, because llama.cpp rotates neighbours of a head there. The
engine rotates halves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import check_shapes

LINK = "weights.gguf"
"""The file, in a folder of `gguf_folder`."""

FLOATS = ("F32", "F16", "BF16")
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {f"ffn_{kind}_exps": f"{kind}_proj" for kind in ("gate", "up", "down")}
"""Tensors [experts, out, in]."""
UNUSED = ("rope_freqs.weight",)
"""In config.json already."""

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def open_gguf(file: Path) -> Any:
    """The package's reader, which maps the file into memory."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError("a GGUF file needs the package gguf: pip install 'diptych[gguf]'") from None
    try:
        return GGUFReader(file)
    except Exception as error:  # of any kind: what a broken file raises depends on how it is broken
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{file} is no GGUF file, or is damaged: {reason:.200}") from None


def gguf_weights(
    path: Path,
    config: ModelConfig,
    on_progress: Callable[[int, int], None] | None = None,
    shards: Shards | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, one tensor at a time, or a rank's parts of them. Names, types and shapes are checked at
    the call: `ValueError`."""
    reader = open_gguf(path)
    tensors = [tensor for tensor in reader.tensors if tensor.name not in UNUSED]
    names = [canonical_names(tensor, path) for tensor in tensors]
    shapes = {
        name: shape_of(tensor)[-2:] if len(own) > 1 else shape_of(tensor)
        for tensor, own in zip(tensors, names)
        for name in own
    }
    check_shapes(shapes, config, str(path))
    _tell_dequantized({tensor.tensor_type.name for tensor in tensors})
    return _stream(list(zip(tensors, names)), path, config, on_progress, shards)


def canonical_names(tensor: Any, path: Path) -> list[str]:
    """One name, or those of all experts. Raises `ValueError` for a tensor or a type that is not supported."""
    kind = tensor.tensor_type.name
    if kind not in FLOATS + QUANTIZED:
        known = ", ".join(FLOATS + QUANTIZED)
        raise ValueError(f"{path}: {tensor.name} is of type {kind}; supported are {known}")
    match = _NAME.fullmatch(tensor.name)
    layer = "" if match is None or match[1] is None else f"model.layers.{match[1]}."
    if match is not None and match[2] in NAMES:
        return [f"{layer}{NAMES[match[2]]}.{match[3]}"]
    if match is not None and match[2] in EXPERTS:
        kind = f"{EXPERTS[match[2]]}.{match[3]}"
        return [f"{layer}mlp.experts.{index}.{kind}" for index in range(shape_of(tensor)[0])]
    raise ValueError(f"{path}: no weight of the supported architectures is named {tensor.name}")


def shape_of(tensor: Any) -> tuple[int, ...]:
    """GGUF counts dimensions from the last one."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _stream(
    entries: list[tuple[Any, list[str]]],
    path: Path,
    config: ModelConfig,
    on_progress: Callable[[int, int], None] | None,
    shards: Shards | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    num_bytes, num_bytes_read = sum(int(tensor.n_bytes) for tensor, _ in entries), 0
    for tensor, names in entries:
        num_bytes_read += int(tensor.n_bytes)
        if shards is None or any(shards.local_names(name) for name in names):
            values = dequantized(tensor)
            if not torch.isfinite(values).all():
                raise ValueError(f"{path}: {tensor.name} has values that are NaN or infinite; it is damaged")
            if config.architecture == "LlamaForCausalLM":
                values = unpermuted(values, names[0], config)
            for name, value in zip(names, values if len(names) > 1 else [values]):
                if shards is None:
                    yield name, value
                else:
                    for local_name in shards.local_names(name):
                        yield local_name, shards.cut(name, value)
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
