"""What quantized weights and inputs stand for, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.types.quant_scheme import FP4_VALUES, INT4_ZERO, MXFP4_BIAS, QuantScheme

FP8_MAX = 448.0
INT8_STEPS = 127.5  # half of the range from -128 to 127


# --8<-- [start:dequantize]
def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: QuantScheme
) -> torch.Tensor:
    """Tensors of a scheme, with any dimensions before -> float32 [..., out, in]."""
    if not scheme.is_packed:
        size = weight.shape[-1]
        by_input = scale.repeat_interleave(scheme.group_size or size, dim=-1)[..., :size]
        return weight.to(torch.float32) * by_input
    bytes_of_groups = weight.unflatten(-1, (scale.shape[-1], -1))
    q = torch.cat((bytes_of_groups & 15, bytes_of_groups >> 4), dim=-1)
    if scheme.weight_type == "mxfp4":
        values = torch.tensor(FP4_VALUES, device=q.device)[q.int()]
        return torch.ldexp(values, scale[..., None].int() - MXFP4_BIAS).flatten(-2)
    if scheme.weight_type == "nvfp4":
        scale = _with_global(scale, zero)
        return (torch.tensor(FP4_VALUES, device=q.device)[q.int()] * scale[..., None]).flatten(-2)
    zeros = INT4_ZERO if zero is None else zero[..., None].to(torch.float32)
    return ((q.to(torch.float32) - zeros) * scale[..., None]).flatten(-2)


# --8<-- [end:dequantize]


def _with_global(scale: torch.Tensor, both: torch.Tensor | None) -> torch.Tensor:
    """Scales of NVFP4 by group and by layer, float32. both: weight_global."""
    assert both is not None
    return scale.float() * both[..., :1] / both[..., 1:]


# --8<-- [start:dequantized-input]
def dequantized_input(
    x: torch.Tensor, scheme: QuantScheme, static: torch.Tensor | None, tp: Collectives | None = None
) -> torch.Tensor:
    """x [..., in_features] as its quantized values say, float32. `tp`: see
    `QuantizedLinear`."""
    x = x.to(torch.float32)
    if scheme.inputs == "none":
        return x
    size = x.shape[-1]
    group_size = (scheme.inputs == "group" and scheme.group_size) or size
    groups = F.pad(x, (0, -size % group_size)).unflatten(-1, (-1, group_size))
    scale = dynamic_scale(groups, scheme, tp) if static is None else static
    if scheme.weight_type == "fp8":
        q = (groups / scale).clamp(-FP8_MAX, FP8_MAX)
        q = q.to(torch.float8_e4m3fn).to(torch.float32)
    else:
        q = (groups / scale).round().clamp(-128, 127)
    return (q * scale).flatten(-2)[..., :size]


# --8<-- [end:dequantized-input]


def dynamic_scale(groups: torch.Tensor, scheme: QuantScheme, tp: Collectives | None) -> torch.Tensor:
    """The scale of each group [..., group size] -> [..., 1]; of a token on several ranks, that of the whole
    token."""
    amax = groups.abs().amax(-1, keepdim=True)
    if tp is not None and scheme.inputs == "token":
        amax = tp.all_gather(amax[None]).amax(0)
    # By a tensor: on CUDA, torch multiplies by the rounded reciprocal of a number instead.
    scale = amax / amax.new_full((), FP8_MAX if scheme.weight_type == "fp8" else INT8_STEPS)
    return torch.where(scale == 0, 1.0, scale)
