"""Tensors as bytes: of each its dtype, shape and contents, which are checked before memory is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int64, torch.int32, torch.float32)}


class _Tensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


_decoder = msgspec.msgpack.Decoder(list[_Tensor | None])


def pack(tensors: Sequence[torch.Tensor | None]) -> bytes:
    """CPU tensors of `DTYPES`."""
    return msgspec.msgpack.encode([None if x is None else _frame(x) for x in tensors])


def unpack(data: bytes | bytearray) -> list[torch.Tensor | None]:
    """Raises `ValueError` for anything that `pack` has not made."""
    return [None if frame is None else _tensor(frame) for frame in _decoder.decode(data)]


def _frame(x: torch.Tensor) -> _Tensor:
    return _Tensor(str(x.dtype).removeprefix("torch."), list(x.shape), x.numpy().tobytes())


def _tensor(frame: _Tensor) -> torch.Tensor:
    dtype = DTYPES.get(frame.dtype)
    if dtype is None or any(size < 0 for size in frame.shape):
        raise ValueError(f"no tensor of {frame.dtype} {frame.shape}")
    if math.prod(frame.shape) * dtype.itemsize != len(frame.data):
        raise ValueError(f"{len(frame.data)} bytes for a tensor of {frame.dtype} {frame.shape}")
    flat = torch.frombuffer(bytearray(frame.data), dtype=dtype) if frame.data else torch.empty(0, dtype=dtype)
    return flat.reshape(frame.shape)
