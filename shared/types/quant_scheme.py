"""QuantScheme: how the weight and the input of a linear layer are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

WeightType = Literal["fp8", "int8", "int4", "mxfp4", "nvfp4"]
InputScales = Literal["none", "static", "token", "group"]

STORED = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
}
INT4_ZERO = 8
"""The zero point of symmetric int4."""
INT8_ZERO = 128
"""What GPTQ adds to symmetric values of 8 bits."""
MXFP4_GROUP = 32
MXFP4_BIAS = 127
"""The scale of a group of inputs is 2 ** (stored - 127)."""
NVFP4_GROUP = 16
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes 0 to 15 stand for: 1 bit of sign, 2 of exponent, 1 of mantissa."""


@dataclass(frozen=True)
class QuantScheme:
    """weight[n, k] = (q[n, k] - zero) * scale, where some outputs n and inputs k share a scale.

    fp8 is e4m3 and int8 is signed; both have no zero point. int4 is 0 to 15; symmetric means that the zero
    point is 8, otherwise each scale has its own. mxfp4 is a code of `FP4_VALUES`, and each group of 32
    inputs has a power of two as scale, stored as its exponent. nvfp4 has the same codes, a scale in e4m3 for
    each group of 16 inputs, and one in float32 for the layer. Groups are of successive inputs; with
    `any_order` the checkpoint has the group of each input, and no kernel multiplies them (`is_dequantized`).

    The inputs of fp8 and int8 may be quantized too, to the type of the weight: with one scale for each token
    ("token"), for `group_size` successive inputs of a token ("group"), or for all tokens ("static": the
    checkpoint has it). "none": the weight alone is quantized.
    """

    weight_type: WeightType
    block_rows: int | None = 1  # successive outputs with one scale in a checkpoint; None: all
    group_size: int | None = None  # successive inputs with one scale; None: all
    inputs: InputScales = "none"
    symmetric: bool = True
    any_order: bool = False

    def __post_init__(self) -> None:
        if self.is_packed and self.inputs != "none":
            raise ValueError(f"{self.weight_type} weights have inputs=none, got {self.inputs}")
        if self.weight_type == "mxfp4" and (self.block_rows, self.group_size) != (1, MXFP4_GROUP):
            raise ValueError(f"mxfp4 weights have block_rows=1 and group_size={MXFP4_GROUP}")
        if self.weight_type == "nvfp4" and (self.block_rows, self.group_size) != (1, NVFP4_GROUP):
            raise ValueError(f"nvfp4 weights have block_rows=1 and group_size={NVFP4_GROUP}")
        if self.weight_type != "int4" and not self.symmetric:
            raise ValueError(f"{self.weight_type} weights are symmetric")
        if self.inputs == "group" and self.group_size is None:
            raise ValueError("inputs=group needs a group_size")

    @property
    def is_packed(self) -> bool:
        """Two values in a byte."""
        return self.weight_type in ("int4", "mxfp4", "nvfp4")

    @property
    def is_dequantized(self) -> bool:
        """Layers become plain ones when they are loaded."""
        return self.any_order

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else -(-in_features // self.group_size)

    def unit(self, in_features: int) -> int:
        """int4, mxfp4 and nvfp4: inputs k and k + unit / 2 of so many successive inputs share a byte."""
        return self.group_size or in_features

    def tensors(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of a layer in memory, by name: shape and dtype. Every output has its own row of scales,
        so that rows of layers with other blocks can follow each other in a merged layer."""
        groups = (out_features, self.num_groups(in_features))
        num_columns = in_features // 2 if self.is_packed else in_features
        scale = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(self.weight_type, torch.float32)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((out_features, num_columns), STORED[self.weight_type]),
            "weight_scale": (groups, scale),
        }
        if self.weight_type == "nvfp4":  # a factor of the scales of an output, and a divisor
            found["weight_global"] = ((out_features, 2), torch.float32)
        if self.any_order:
            found["weight_group"] = ((in_features,), torch.int32)
        if not self.symmetric:
            found["weight_zero"] = (groups, torch.uint8)
        if self.inputs == "static":
            found["input_scale"] = ((1,), torch.float32)
        return found

    def check(self, name: str, in_features: int) -> None:
        """Raise `ValueError` if a layer of so many inputs cannot have this scheme."""
        unit = self.unit(in_features)
        if self.is_packed and (unit % 2 != 0 or in_features % unit != 0):
            raise ValueError(
                f"{name}: {self.weight_type} weights in groups of {unit} need a multiple of that as inputs, "
                f"and an even group; there are {in_features}"
            )

    def __str__(self) -> str:
        rows = "tensor" if self.block_rows is None else "channel"
        if self.group_size is not None:
            rows = (
                f"{self.block_rows}x{self.group_size} blocks"
                if self.block_rows != 1
                else (f"groups of {self.group_size}")
            )
        zero = (", in any order" if self.any_order else "") + ("" if self.symmetric else ", zero points")
        inputs = "inputs not quantized" if self.inputs == "none" else f"{self.inputs} scales of inputs"
        return f"{self.weight_type} by {rows}{zero}, {inputs}"
