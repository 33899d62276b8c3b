"""K and V as an FP8 pool stores them."""

from __future__ import annotations

import torch

from shared.types.attention import FP8, FP8_MAX


def to_pool_dtype(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x cast to the dtype of a pool; in FP8 x / scale. x itself is not modified: a model may read it again.
    Clamped before the cast, which makes larger values NaN in older versions of torch."""
    if dtype != FP8:
        return x.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
