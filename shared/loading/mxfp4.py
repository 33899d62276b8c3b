"""Reads MXFP4 experts as GPT-OSS stores them: all experts of a layer in two tensors for each matrix.

    mlp.experts.gate_up_proj_blocks [E, 2 * intermediate, hidden / 32, 16]   uint8
    mlp.experts.gate_up_proj_scales [E, 2 * intermediate, hidden / 32]       uint8
    mlp.experts.down_proj_blocks    [E, hidden, intermediate / 32, 16]
    mlp.experts.down_proj_scales    [E, hidden, intermediate / 32]

A byte holds two successive inputs, the first in its low half. Even rows of gate_up_proj are gate's, odd ones
up's. A scale is 2 ** (stored - 127); 255 stands for NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from diptych.shared.loading.quantized_formats import pack_units
from diptych.shared.loading.quantized_weights import Layer
from diptych.shared.loading.safetensors_file import TensorInfo
from diptych.shared.loading.shards import Shards
from diptych.shared.types.quant_scheme import MXFP4_GROUP

_PACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj_(blocks|scales)")
_SUFFIX = {"blocks": "weight", "scales": "weight_scale"}


class Packed(NamedTuple):
    """A tensor of all experts of a layer, and its rows for each matrix."""

    name: str
    info: TensorInfo
    suffix: str  # in QuantScheme.tensors
    parts: dict[str, slice]  # of each expert: gate_proj, up_proj, down_proj -> rows
    layers: dict[str, list[Layer]]  # the same -> by expert


def take_mxfp4(tensors: dict[str, TensorInfo], layers: dict[str, Layer], where: str) -> list[Packed]:
    """Remove the experts of `layers` from the tensors of a checkpoint. Raises `ValueError` for missing ones
    and wrong shapes."""
    experts: dict[str, dict[str, list[Layer]]] = {}
    for layer in layers.values():  # in order of experts
        prefix, _, proj = layer.name.rpartition(".")
        experts.setdefault(prefix.rpartition(".")[0], {}).setdefault(proj, []).append(layer)
    found, problems = [], []
    for prefix, by_proj in experts.items():
        num_experts = len(by_proj["down_proj"])
        for matrix in ("gate_up", "down"):
            first = by_proj["down_proj" if matrix == "down" else "gate_proj"][0]
            groups = first.size // MXFP4_GROUP
            rows = first.out if matrix == "down" else 2 * first.out
            for kind, shape in (("blocks", (groups, MXFP4_GROUP // 2)), ("scales", (groups,))):
                name = f"{prefix}.{matrix}_proj_{kind}"
                info = tensors.pop(name, None)
                if info is None:
                    problems.append(f"{name} is missing")
                elif info.dtype != "U8" or info.shape != (num_experts, rows, *shape):
                    wanted = [num_experts, rows, *shape]
                    problems.append(f"{name} is {info.dtype} {list(info.shape)}, not U8 {wanted}")
                else:
                    parts = {"down_proj": slice(None)}
                    if matrix == "gate_up":
                        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
                    found.append(Packed(name, info, _SUFFIX[kind], parts, by_proj))
    if problems:
        raise ValueError(f"{where}: the weights do not fit quant_method mxfp4: {'; '.join(problems[:3])}")
    return found


def read_mxfp4(packed: list[Packed], shards: Shards | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `QuantScheme.tensors` of each expert and matrix, or a rank's parts of them."""
    for name, info, suffix, parts, layers in packed:
        try:
            with safe_open(info.path, framework="pt", device="cpu") as file:
                of_experts = file.get_slice(name)
                for expert_id in range(info.shape[0]):
                    for proj, rows in parts.items():
                        layer = layers[proj][expert_id]
                        names = [layer.name] if shards is None else shards.local_names(layer.name)
                        if not names:
                            continue
                        (outs,), inputs = layer.part(shards)
                        groups = slice(inputs.start // MXFP4_GROUP, inputs.stop // MXFP4_GROUP)
                        stored = of_experts[expert_id][rows][outs, groups]
                        tensor = _repacked(stored) if suffix == "weight" else stored.contiguous()
                        if suffix == "weight_scale" and bool((tensor == 255).any()):
                            raise ValueError(f"{info.path}: {name} has scales that are NaN (255)")
                        for local_name in names:
                            yield f"{local_name}.{suffix}", tensor
        except SafetensorError as error:
            raise ValueError(f"{info.path} is damaged: {error}") from None


def _repacked(blocks: torch.Tensor) -> torch.Tensor:
    """[rows, groups, 16] -> [rows, inputs / 2] in the order of `QuantScheme.unit`."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    return pack_units(codes.flatten(1), MXFP4_GROUP)
