"""How checkpoints store the tensors of a quantized linear layer: their names, shapes and packing.

A table lists the tensors in a checkpoint of a layer with `out` outputs and `size` inputs. `decode` turns a
stored tensor, or a rank's slice of it, into a matrix with one row for each output: one int4 value per input,
one scale and zero point per group of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from diptych.shared.types.quant_scheme import INT8_ZERO, NVFP4_GROUP, QuantScheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of 8, that each nibble of an int32 is."""


@dataclass(frozen=True)
class Axis:
    """The dimension of outputs or inputs in a stored tensor, and the number of them per entry."""

    dim: int
    unit: int = 1

    def num_entries(self, number: int) -> int:
        return -(-number // self.unit)


@dataclass(frozen=True)
class Stored:
    """A tensor of a layer in a checkpoint."""

    target: str  # of QuantScheme.tensors; "": it is checked and not used
    dtypes: tuple[str, ...]  # as safetensors names them
    out: Axis | None
    inputs: Axis | None
    decode: Callable[[torch.Tensor], torch.Tensor]
    optional: bool = False

    def shapes(self, out: int, size: int) -> list[tuple[int, ...]]:
        """The allowed shapes in a layer of these sizes; []: any."""
        if not self.target:
            return []
        if self.out is None and self.inputs is None:
            return [(), (1,), (1, 1)]
        if self.out is None and self.inputs is not None:
            return [(size,)]
        if self.inputs is None:
            assert self.out is not None
            return [(self.out.num_entries(out), 1), (self.out.num_entries(out),)]
        assert self.out is not None
        return [
            tuple(
                number
                for _, number in sorted(
                    [
                        (self.out.dim, self.out.num_entries(out)),
                        (self.inputs.dim, self.inputs.num_entries(size)),
                    ]
                )
            )
        ]


FLOATS = ("F32", "BF16", "F16")


def stored_tensors(storage: str, scheme: QuantScheme) -> dict[str, Stored]:
    """The tensors of a layer in a checkpoint, by the end of their name. `storage`: QuantConfig.storage."""
    if storage in ("gptq", "gptq_v2", "awq"):
        return _columns(storage, scheme)
    inputs = Axis(1, scheme.group_size) if scheme.group_size is not None else None
    if scheme.weight_type == "int4":
        found = {
            "weight_packed": Stored("weight", ("I32",), Axis(0), Axis(1, 8), lambda t: unpack(t, 1)),
            "weight_scale": Stored("weight_scale", FLOATS, Axis(0), inputs, _rows),
            "weight_shape": Stored("", ("I64", "I32"), None, None, _rows, True),
        }
        if not scheme.symmetric:
            found["weight_zero_point"] = Stored(
                "weight_zero", ("I32",), Axis(0, 8), inputs, lambda t: unpack(t, 0)
            )
        return found
    if scheme.weight_type == "nvfp4":
        return _nvfp4(storage)
    rows = None if scheme.block_rows is None else Axis(0, scheme.block_rows)
    weight = {"fp8": "F8_E4M3", "int8": "I8"}[scheme.weight_type]
    names = ("weight", "weight_scale")
    if storage == "torchao":
        names = ("_weight_qdata", "_weight_scale")
    elif storage == "fp8" and scheme.group_size is not None:
        names = ("weight", "weight_scale_inv")  # multiplied, despite the name
    found = {
        names[0]: Stored("weight", (weight,), Axis(0), Axis(1), lambda t: t),
        names[1]: Stored("weight_scale", FLOATS, rows, inputs, _scales_of(scheme)),
    }
    for name in ("weight_zero_point", "input_zero_point"):  # of symmetric values: 0
        found[name] = Stored("", ("I8", "I32", "I64", "F8_E4M3"), None, None, _rows, True)
    if scheme.inputs == "static":
        found["input_scale"] = Stored("input_scale", FLOATS, None, None, _rows)
    return found


def _columns(storage: str, scheme: QuantScheme) -> dict[str, Stored]:
    """GPTQ and AWQ: a column for each output, several values in an int32."""
    groups = Axis(0, scheme.group_size or 2**31)  # a channel is one group
    order, num_bits = AWQ_ORDER if storage == "awq" else None, 8 if scheme.weight_type == "int8" else 4
    each = 32 // num_bits
    # Version 1 of GPTQ stores the zero point less 1. Symmetric zero points are only checked, because
    # files of version 2 are often labelled as version 1.
    added = 1 if storage == "gptq" and not scheme.symmetric else 0

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if storage == "awq":
            return unpack(tensor, 1, order).T
        found = unpack(tensor, 0, num_bits=num_bits).T
        return found if num_bits == 4 else (found.to(torch.int16) - INT8_ZERO).to(torch.int8)

    return {
        "qweight": Stored(
            "weight", ("I32",), Axis(1, each if storage == "awq" else 1),
            Axis(0, 1 if storage == "awq" else each), values,
        ),
        "qzeros": Stored(
            "weight_zero", ("I32",), Axis(1, each), groups,
            lambda t: unpack(t, 1, order, num_bits).T + added, optional=scheme.symmetric,
        ),
        "scales": Stored("weight_scale", FLOATS, Axis(1), groups, lambda t: t.float().T),
        "g_idx": Stored("weight_group", ("I32",), None, Axis(0), lambda t: t)
        if scheme.any_order
        else Stored("", ("I32",), None, None, _rows, optional=True),
    }  # fmt: skip


def _nvfp4(storage: str) -> dict[str, Stored]:
    """A layer in NVFP4. compressed-tensors stores the divisor of the scales, ModelOpt their factor. The scale
    of inputs is checked and not used: inputs stay as they are."""
    scales = Stored("weight_scale", ("F8_E4M3",), Axis(0), Axis(1, NVFP4_GROUP), _rows)
    if storage == "compressed-tensors":
        names = ("weight_packed", "weight_global_scale", "input_global_scale")
        is_factor = False
    else:
        names = ("weight", "weight_scale_2", "input_scale")
        is_factor = True

    def both(tensor: torch.Tensor) -> torch.Tensor:
        value, one = tensor.float().reshape(1, 1), torch.ones(1, 1)
        return torch.cat((value, one) if is_factor else (one, value), dim=1)

    return {
        names[0]: Stored("weight", ("U8",), Axis(0), Axis(1, 2), _unpack_bytes),
        "weight_scale": scales,
        names[1]: Stored("weight_global", FLOATS, None, None, both),
        names[2]: Stored("", FLOATS, None, None, _rows, optional=True),
    }


def _unpack_bytes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, n] -> [rows, 2n] of 4 bits each, the low half of a byte first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def unpack(
    packed: torch.Tensor, dim: int, order: tuple[int, ...] | None = None, num_bits: int = 4
) -> torch.Tensor:
    """int32 -> uint8 with 32 / num_bits times as many entries along `dim`, the lowest bits first. `order`:
    which of the entries each is."""
    parts = [(packed >> start) & (2**num_bits - 1) for start in range(0, 32, num_bits)]
    values = torch.stack(parts, dim=dim + 1).to(torch.uint8)
    if order is not None:
        values = values.index_select(dim + 1, torch.tensor(order).argsort())
    return values.flatten(dim, dim + 1)


def pack_units(values: torch.Tensor, unit: int) -> torch.Tensor:
    """uint8 [..., inputs] of 0 to 15 -> [..., inputs / 2]: input k of a unit is in the low half of a byte,
    and input k + unit / 2 in its high half."""
    low, high = values.unflatten(-1, (-1, 2, unit // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def _scales_of(scheme: QuantScheme) -> Callable[[torch.Tensor], torch.Tensor]:
    def decode(tensor: torch.Tensor) -> torch.Tensor:
        scales = _rows(tensor)
        return scales if scheme.block_rows in (None, 1) else scales.repeat_interleave(scheme.block_rows, 0)

    return decode
