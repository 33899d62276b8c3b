"""Weights: streamed from a checkpoint or random, and copied into a model. Names are the canonical ones of
`diptych.shared.loading.weight_names`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from diptych.shared.config import ModelConfig, read_config
from diptych.shared.interfaces.layers import MergedLinear
from diptych.shared.interfaces.moe import FusedExperts
from diptych.shared.interfaces.quantized_experts import QuantizedExperts
from diptych.shared.loading.gguf_weights import LINK as GGUF_LINK
from diptych.shared.loading.gguf_weights import gguf_weights
from diptych.shared.loading.mxfp4 import read_mxfp4, take_mxfp4
from diptych.shared.loading.quantized_weights import (
    dequantize_some,
    quantize_while_reading,
    quantized_layers,
    read_quantized,
    take_quantized,
)
from diptych.shared.loading.safetensors_file import (
    QUANTIZED_DTYPES,
    SUPPORTED_DTYPES,
    TensorInfo,
    read_checkpoint,
)
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import (
    WeightPart,
    canonical_parts,
    check_shapes,
    expected_shapes,
    is_harmless,
)

Weights = Iterator[tuple[str, torch.Tensor]]

PIECE_BYTES = 64 * 2**20
"""Weights are cast and moved in pieces of this size, which a device needs in addition to the model."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

LARGE_BYTES = 512 * 2**20
"""A random tensor beyond this size is made piece by piece. It is collected on the CPU if the device has less
than FREE_TIMES its memory free, because there an embedding would need it twice for a moment."""
FREE_TIMES = 16


def iterate_weights(
    folder: str | Path,
    config: ModelConfig | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    shards: Shards | None = None,
    device: torch.device | str = "cpu",
) -> Weights:
    """The weights of a Hugging Face folder on the CPU, one tensor at a time. `device`: the device that
    quantizes weights of an unquantized checkpoint.

    Headers and sizes are checked at the call, before any tensor is read. A NaN, an infinity, or a tied head
    that is not a copy is found when its tensor is read. All errors are `ValueError`. `config` defaults to the
    folder's own. `on_progress` is called with (bytes read so far, bytes in all). `shards`: read only the
    parts of one rank.
    """
    folder = Path(folder)
    config = read_config(folder) if config is None else config
    quantization, is_gguf = config.quantization, (folder / GGUF_LINK).is_file()
    rounded = ("online",) if is_gguf else ("online", "gguf")  # new weights for the blocks of a file
    if quantization is not None and quantization.storage in rounded:
        whole = iterate_weights(folder, replace(config, quantization=None), on_progress)
        return quantize_while_reading(whole, config, device, shards)
    if is_gguf:
        return gguf_weights(folder / GGUF_LINK, config, on_progress, shards)
    checkpoint = read_checkpoint(
        folder, SUPPORTED_DTYPES + (QUANTIZED_DTYPES if quantization is not None else ())
    )
    tensors = {name: info for name, info in checkpoint.items() if not is_harmless(name, config)}
    layers = quantized_layers(config) if config.quantization is not None else {}
    quantized: Weights = iter(())
    if quantization is not None and quantization.storage == "mxfp4":
        quantized = read_mxfp4(take_mxfp4(tensors, layers, str(folder)), shards)
    elif quantization is not None:
        entries = take_quantized(tensors, layers, config, str(folder))
        plain_bytes = sum(info.num_bytes for info in tensors.values())
        num_bytes = plain_bytes + sum(entry.info.num_bytes for entry in entries)
        quantized = dequantize_some(
            read_quantized(entries, shards, _later(on_progress, plain_bytes, num_bytes)), config, shards
        )
        on_progress = _later(on_progress, 0, num_bytes)
    parts = [part for name, info in tensors.items() for part in canonical_parts(name, info.shape, config)]
    shapes = {part.name: part.shape for part in parts}
    shapes |= {f"{layer.name}.weight": (layer.out, layer.size) for layer in layers.values()}
    check_shapes(shapes, config, str(folder))
    weights = chain(stream(tensors, on_progress, shards, config), quantized)
    head = checkpoint.get(HEAD) if config.tie_word_embeddings and shards is None else None
    return weights if head is None else _with_tied_head(weights, head)


def _later(
    on_progress: Callable[[int, int], None] | None, before: int, num_bytes: int
) -> Callable[[int, int], None] | None:
    """The progress callback of one of several successive sources, given the bytes before it and in all."""
    return None if on_progress is None else lambda done, _: on_progress(before + done, num_bytes)


def _with_tied_head(weights: Weights, head: TensorInfo) -> Weights:
    """Check a tied head that a checkpoint contains: if it is not a copy of the embedding, the config is
    wrong."""
    for name, tensor in weights:
        if name == EMBEDDING and not _is_copy(head, tensor):
            raise ValueError(
                f"{head.path}: config.json says tie_word_embeddings, but {HEAD} is not {EMBEDDING}. Set "
                f"tie_word_embeddings to false to use it, or remove it"
            )
        yield name, tensor


def _is_copy(info: TensorInfo, tensor: torch.Tensor) -> bool:
    if info.shape != tensor.shape:
        return False
    with safe_open(info.path, framework="pt", device="cpu") as file:
        stored = file.get_slice(HEAD)
        num_rows = max(1, PIECE_BYTES // (tensor.shape[1] * tensor.itemsize))
        starts = range(0, tensor.shape[0], num_rows)
        pieces = ((tensor[i : i + num_rows], stored[i : i + num_rows]) for i in starts)
        return all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in pieces)


def stream(
    tensors: Mapping[str, TensorInfo],
    on_progress: Callable[[int, int], None] | None,
    shards: Shards | None = None,
    config: ModelConfig | None = None,
) -> Weights:
    """Yields the tensors of a checkpoint, or the parts of one rank, file by file; fused layers and packed
    experts one by one."""
    num_bytes, num_bytes_read = sum(info.num_bytes for info in tensors.values()), 0
    for path in dict.fromkeys(info.path for info in tensors.values()):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name, info in tensors.items():
                    if info.path != path:
                        continue
                    parts = canonical_parts(name, info.shape, config)
                    num_bytes_read += info.num_bytes
                    if shards is not None and not any(shards.local_names(part.name) for part in parts):
                        continue
                    is_as_stored = len(parts) == 1 and parts[0].index == () and not parts[0].is_transposed
                    if shards is not None and is_as_stored:
                        tensor = shards.read(parts[0].name, file.get_slice(name))
                    else:
                        tensor = file.get_tensor(name)
                    _refuse_non_finite(name, tensor, path)
                    for part in parts:
                        if shards is None:
                            yield part.name, part.of(tensor)
                            continue
                        if is_as_stored:
                            own = shards.own(part.name, tensor)
                        else:
                            own = shards.cut(part.name, part.of(tensor))
                        for local_name in shards.local_names(part.name):
                            yield local_name, own
                    if on_progress is not None:
                        on_progress(num_bytes_read, num_bytes)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def _refuse_non_finite(name: str, tensor: torch.Tensor, path: Path) -> None:
    if tensor.numel() == 0:
        return
    # The fastest check of all values: minimum and maximum propagate NaN.
    if all(torch.isfinite(extreme) for extreme in tensor.aminmax()):
        return
    num_bad = int((~torch.isfinite(tensor)).sum())
    raise ValueError(
        f"{path}: {num_bad:,} of the {tensor.numel():,} values of {name} are NaN or infinite; "
        f"the file is damaged"
    )


def dummy_weights(
    config: ModelConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shards: Shards | None = None,
) -> Weights:
    """Seeded random weights of the model's shapes and dtype, with which activations neither vanish nor
    diverge. A tensor depends only on seed, name, shape, dtype and kind of device, not on other tensors.
    `shards`: the parts of one rank, cut from the same tensors."""
    if config.quantization is not None:
        whole = dummy_weights(replace(config, quantization=None), seed, device)
        yield from dequantize_some(quantize_while_reading(whole, config, device, shards), config, shards)
        return
    for name, tensor in dummy_tensors(expected_shapes(config), config.dtype, seed, device):
        if shards is None:
            yield name, tensor
        else:
            for local_name in shards.local_names(name):
                yield local_name, shards.cut(name, tensor)


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int, device: torch.device | str
) -> Weights:
    device = torch.device(device)
    for name, shape in shapes.items():
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        if len(shape) == 2:
            mean, std = 0.0, shape[1] ** -0.5
        else:
            mean, std = 0.0 if name.endswith(".bias") else 1.0, 0.1
        yield name, _normal(shape, dtype, device, mean, std, generator)


def _normal(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mean: float,
    std: float,
    generator: torch.Generator,
) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= LARGE_BYTES or device.type == "cpu":
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, std, generator=generator)
    is_roomy = device.type == "cuda" and FREE_TIMES * num_bytes < torch.cuda.mem_get_info(device)[0]
    tensor = torch.empty(shape, dtype=dtype, device=device if is_roomy else "cpu")
    for piece in pieces(tensor):
        piece.copy_(torch.empty_like(piece, device=device).normal_(mean, std, generator=generator))
    return tensor


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of successive rows, about PIECE_BYTES of float32 each. They are the same for tensors of one
    shape."""
    row_bytes = 4 * tensor[:1].numel()
    return tensor.split(max(PIECE_BYTES // max(row_bytes, 1), 1))


def named_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The targets of a model's weights by name: its parameters; those of FusedExperts by expert, those of a
    MergedLinear by part."""
    targets: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        if isinstance(module, MergedLinear):
            for name, _ in module.named_parameters():
                del targets[f"{prefix}.{name}"]
            parent = prefix[: prefix.rfind(".") + 1]
            targets |= {f"{parent}{name}": view for name, view in module.weight_views().items()}
        if isinstance(module, QuantizedExperts):
            for name, _ in module.named_parameters():
                del targets[f"{prefix}.{name}"]
            targets |= {f"{prefix}.{name}": view for name, view in module.weight_views().items()}
        elif isinstance(module, FusedExperts):
            for kind, up_name, down_name in (("weight", "w13", "w2"), ("bias", "b13", "b2")):
                if f"{prefix}.{up_name}" not in targets:
                    continue
                w13, w2 = targets.pop(f"{prefix}.{up_name}"), targets.pop(f"{prefix}.{down_name}")
                for expert_id in range(w13.shape[0]):
                    gate, up = w13[expert_id].chunk(2)
                    targets[f"{prefix}.{expert_id}.gate_proj.{kind}"] = gate
                    targets[f"{prefix}.{expert_id}.up_proj.{kind}"] = up
                    targets[f"{prefix}.{expert_id}.down_proj.{kind}"] = w2[expert_id]
    return targets


def load_weights(
    weights: Iterable[tuple[str, torch.Tensor]], targets: Mapping[str, torch.Tensor], config: ModelConfig
) -> None:
    """Copy each weight into its target, cast to its dtype and device. Takes canonical and Hugging Face names.
    Raises `ValueError` for unknown, repeated and missing names, and for wrong shapes."""
    remaining = dict(targets)
    for checkpoint_name, tensor in weights:
        shape = tuple(tensor.shape)
        parts = [WeightPart(checkpoint_name, (), shape)]
        if checkpoint_name not in targets:
            parts = canonical_parts(checkpoint_name, shape, config)
        for part in parts:
            name, shape = part.name, part.shape
            target = remaining.pop(name, None)
            if target is None:
                if is_harmless(name, config):
                    continue
                problem = "came twice" if name in targets else f"is no weight of a {config.architecture}"
                raise ValueError(f"{name} {problem}")
            if shape != tuple(target.shape):
                raise ValueError(f"{name} has shape {list(shape)}; it must be {list(target.shape)}")
            for to, source in zip(pieces(target), pieces(part.of(tensor))):
                to.copy_(source)
    if remaining:
        names = list(remaining)
        raise ValueError(
            f"{len(names)} of {len(targets)} weights of a {config.architecture} are missing: "
            f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        )
