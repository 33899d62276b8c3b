"""Rounding of weights to a quantized type when they are loaded, and quantized layers in a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from diptych.shared.config import ModelConfig, QuantConfig
from diptych.shared.config.quant_config import DEQUANTIZED
from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.interfaces.layers import MergedLinear
from diptych.shared.interfaces.moe import FusedExperts
from diptych.shared.loading.quantized_formats import pack_units
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.modeling.dequantized_values import FP8_MAX
from diptych.shared.types.quant_scheme import FP4_VALUES, INT4_ZERO, MXFP4_BIAS, QuantScheme

_LAYER = re.compile(r"(model\.layers\.)(\d+)")
MERGED = re.compile(
    r"((?<=self_attn\.)[qkv]_proj|(?<=\.)(gate|up)_proj|(?<=linear_attn\.)(?!out_proj|[fg]_b_proj)\w+)$"
)
"""The ends of the names of linear layers that become one."""


def quantize_weight(weight: torch.Tensor, scheme: QuantScheme) -> dict[str, torch.Tensor]:
    """weight [out, in] -> the tensors of `QuantScheme.tensors`: the largest value of a block is the largest
    of the type, and the others are rounded to the nearest."""
    # --8<-- [start:quantize-weight]
    out, size = weight.shape
    rows, columns = min(scheme.block_rows or out, out), min(scheme.group_size or size, size)
    blocks = nn.functional.pad(weight.float(), (0, -size % columns, 0, -out % rows))
    blocks = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [blocks, rows, groups, columns]
    largest = blocks.abs().amax((1, 3), keepdim=True)
    if scheme.weight_type in ("mxfp4", "nvfp4"):
        return (_quantize_mxfp4 if scheme.weight_type == "mxfp4" else _quantize_nvfp4)(blocks, largest)
    scale = largest / {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[scheme.weight_type]
    q = blocks / torch.where(scale == 0, 1.0, scale)
    if scheme.weight_type == "fp8":
        q = q.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    elif scheme.weight_type == "int8":
        q = q.round().to(torch.int8)
    else:
        q = (q.round() + INT4_ZERO).to(torch.uint8)
    q = q.flatten(2).flatten(0, 1)[:out, :size]
    if scheme.weight_type == "int4":
        q = pack_units(q, columns)
    return {"weight": q, "weight_scale": scale.expand(-1, rows, -1, 1).flatten(2).flatten(0, 1)[:out]}
    # --8<-- [end:quantize-weight]


def _quantize_mxfp4(blocks: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
    """blocks [out, 1, groups, 32] -> codes and exponents. The largest value of a group is 4 to 8 times its
    scale; what is beyond 6 becomes 6."""
    exponent = (torch.frexp(largest).exponent - 3).clamp(min=-MXFP4_BIAS)
    packed = _packed_fp4(torch.ldexp(blocks, -exponent))
    return {"weight": packed, "weight_scale": (exponent + MXFP4_BIAS).to(torch.uint8).flatten(1)}


def _quantize_nvfp4(blocks: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
    """blocks [out, 1, groups, 16] -> codes, scales in e4m3, and the layer's factor. The largest value of the
    layer is 6 times the largest scale, 448."""
    factor = largest.amax() / (FP4_VALUES[7] * FP8_MAX)
    factor = torch.where(factor == 0, 1.0, factor)
    scale = (largest / (FP4_VALUES[7] * factor)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    step = scale.float() * factor
    both = torch.stack((factor, torch.ones_like(factor))).expand(len(blocks), 2)
    packed = _packed_fp4(blocks / torch.where(step == 0, torch.inf, step))
    return {"weight": packed, "weight_scale": scale.flatten(1), "weight_global": both}


def _packed_fp4(values: torch.Tensor) -> torch.Tensor:
    """[out, 1, groups, unit] -> the codes of the nearest `FP4_VALUES`, packed."""
    sizes = torch.tensor(FP4_VALUES[:8], device=values.device)
    codes = torch.bucketize(values.abs(), (sizes[1:] + sizes[:-1]) / 2, out_int32=True).to(torch.uint8)
    codes |= (values < 0).to(torch.uint8) << 3
    return pack_units(codes.flatten(2).flatten(0, 1), values.shape[-1])


def quantize_linears(
    model: nn.Module,
    config: QuantConfig,
    component: Callable[[str], Any],
    shards: Shards | None = None,
    ranks: Collectives | None = None,
    ranks_of_experts: Collectives | None = None,
) -> None:
    """Put quantized layers in place of a model's linear layers and experts, before its weights are loaded:
    those of the components `quantization` and `quantized_experts`. `shards`: the parts of this rank among
    `ranks`, and those of experts among `ranks_of_experts` (None: the same). Raises `ValueError` for a module
    that cannot be quantized as the config says."""
    first_layer = shards.first_layer if shards is not None else 0
    for path, module in list(model.named_modules()):
        if path.endswith(DEQUANTIZED):
            continue
        schemes = {
            name: config.scheme_in_memory(_whole_name(name, first_layer)) for name in _linears(path, module)
        }
        distinct = set(schemes.values())
        if distinct <= {None}:
            continue
        if len(distinct) > 1:
            raise ValueError(
                f"{path} has parts with different quantization: "
                + "; ".join(f"{name}: {scheme or 'none'}" for name, scheme in schemes.items())
                + ". One merged layer cannot hold them; panel=reference does not merge"
            )
        (scheme,) = distinct
        assert scheme is not None
        if isinstance(module, FusedExperts):
            replacement = component("quantized_experts").like(module, scheme)
        else:
            replacement = component("quantization").quantized(module, scheme)
        if replacement is None:
            raise ValueError(f"{path} ({type(module).__name__}) cannot be quantized to {scheme}")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replacement)
        if shards is not None:
            last = _whole_name(list(schemes)[-1], first_layer)
            is_routed = isinstance(module, FusedExperts)
            among = ranks_of_experts if is_routed and ranks_of_experts is not None else ranks
            replacement.tp = _ranks_of_inputs(last, scheme, shards, among)


def _ranks_of_inputs(
    name: str, scheme: QuantScheme, shards: Shards, ranks: Collectives | None
) -> Collectives | None:
    """The ranks among which the inputs of a layer are divided; None: each rank has all of them."""
    if len(shards.index(f"{name}.weight")) < 2:
        return None
    if shards.ep > 1 and ".experts." in name and scheme.inputs == "token":
        ranks_are = "dp * tp" if shards.dp > 1 else "tp"
        raise ValueError(
            f"{ranks_are}={shards.size}, ep={shards.ep}: {name} with {scheme} needs the largest input of the "
            f"{shards.size // shards.ep} ranks of its part; use ep={shards.size}, or ep=1"
        )
    return ranks


def _linears(path: str, module: nn.Module) -> list[str]:
    """The checkpoint's names of the linear layers that a module is; [] for other modules."""
    weight = getattr(module, "weight", None)
    if isinstance(module, MergedLinear) and (weight is None or weight.dim() == 2):  # no convolutions
        parent = path[: path.rfind(".") + 1]
        return [
            parent + name.removesuffix(".weight") for name in module.weight_views() if name.endswith("weight")
        ]
    if isinstance(module, FusedExperts):
        return [f"{path}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    is_linear = isinstance(weight, nn.Parameter) and weight.dim() == 2
    return [path] if is_linear and not isinstance(module, nn.Embedding) else []


def _whole_name(name: str, first_layer: int) -> str:
    return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first_layer}", name)


def num_weight_bytes(
    shapes: Mapping[str, tuple[int, ...]], config: QuantConfig | None, dtype: torch.dtype
) -> int:
    """Bytes of weights of these shapes, by canonical name, when they are loaded."""
    num_bytes = 0
    for name, shape in shapes.items():
        scheme = scheme_of_weight(config, name, shape)
        if scheme is None or scheme.is_dequantized or name.endswith(f"{DEQUANTIZED}.weight"):
            num_bytes += math.prod(shape) * dtype.itemsize
        else:
            tensors = scheme.tensors(*shape).values()
            num_bytes += sum(math.prod(its_shape) * its_dtype.itemsize for its_shape, its_dtype in tensors)
    return num_bytes


def scheme_of_weight(config: QuantConfig | None, name: str, shape: tuple[int, ...]) -> QuantScheme | None:
    """The scheme of a weight by its canonical name and shape; None: it is not quantized."""
    if config is None or not name.endswith(".weight") or len(shape) != 2:
        return None
    return config.scheme_of(name.removesuffix(".weight"))


def with_quantization(config: ModelConfig, method: str | None) -> ModelConfig:
    """A model's config with the flag `quantization`. Raises `ValueError` if the checkpoint is quantized."""
    if method is None:
        return config
    if config.quantization is not None:
        raise ValueError(
            f"quantization={method}: the checkpoint is already quantized ({config.quantization.storage})"
        )
    sizes = {shape[1] for shape in expected_shapes(config).values() if len(shape) == 2}
    return replace(config, quantization=QuantConfig.online(method, sizes))
