"""Tensors as bytes: of each its dtype, shape and contents, which are checked before memory is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from diptych.shared.parallel.channel import decoder

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16)
}


class _Tensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


_decode = decoder(list[_Tensor | None])


def pack(tensors: Sequence[torch.Tensor | None]) -> bytes:
    """CPU tensors of `DTYPES`."""
    return msgspec.msgpack.encode([None if x is None else _frame(x) for x in tensors])


def unpack(data: bytes | bytearray) -> list[torch.Tensor | None]:
    """Raises `ValueError` for anything that `pack` has not made."""
    return [None if frame is None else _tensor(frame) for frame in _decode(data)]


def _frame(x: torch.Tensor) -> _Tensor:
    return _Tensor(str(x.dtype).removeprefix("torch."), list(x.shape), bytes_of(x))


def bytes_of(x: torch.Tensor) -> bytes:
    """The contents of a tensor, row after row."""
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(frame: _Tensor) -> torch.Tensor:
    return tensor_of(frame.dtype, frame.shape, frame.data)


def tensor_of(dtype_name: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """The tensor of these contents. Raises `ValueError` for another type than `DTYPES` or another size."""
    dtype = DTYPES.get(dtype_name)
    if dtype is None or any(size < 0 for size in shape):
        raise ValueError(f"no tensor of {dtype_name} {list(shape)}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of {dtype_name} {list(shape)}")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(tuple(shape))
