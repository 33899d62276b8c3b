"""Schemes of expert weights that libraries compute, and the orders in which they take them."""

from __future__ import annotations

import torch

from diptych.shared.types.quant_scheme import MXFP4_GROUP, QuantScheme

FP8_BLOCKS = QuantScheme("fp8", 128, 128, "group")
MXFP4 = QuantScheme("mxfp4", 1, MXFP4_GROUP)


def swap_halves(parameter: torch.Tensor) -> None:
    """Gate before up becomes up before gate, in place, expert by expert to save memory."""
    for rows in rows_of(parameter):
        gate, up = rows.chunk(2)
        rows.copy_(torch.cat((up, gate)))


def interleave_halves(parameter: torch.Tensor) -> None:
    """Gate before up becomes rows of gate and up in turn, in place."""
    for rows in rows_of(parameter):
        rows.copy_(torch.stack(rows.chunk(2), 1).flatten(0, 1))


def rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """The bytes of w13, its scales or its bias: [num_experts, 2 * intermediate, bytes]."""
    return parameter.data.view(torch.uint8).view(*parameter.shape[:2], -1)


def adjacent_inputs(weight: torch.Tensor) -> torch.Tensor:
    """MXFP4 codes [..., inputs / 2] in the order of `QuantScheme.unit` -> two successive inputs in each byte,
    the first in its low half."""
    low, high = weight.view(*weight.shape[:-1], -1, MXFP4_GROUP // 4, 2).unbind(-1)
    # low and high: inputs 0, 2 .. 14 and 1, 3 .. 15 of a group, with 16 more in their high halves.
    first = (low & 15) | (high & 15) << 4
    second = low >> 4 | high & 240
    return torch.cat((first, second), -1).flatten(-2)
