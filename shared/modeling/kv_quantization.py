"""K and V as an FP8 pool stores them."""

from __future__ import annotations

import torch

from shared.types.attention import FP8, FP8_MAX, KVScales


def to_fp8(k: torch.Tensor, v: torch.Tensor, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """k / scales.k and v / scales.v in FP8. k and v are not modified, because a model may read them again.
    Values are clamped before the cast, which turns larger ones into NaN in older versions of torch."""

    def quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)

    return quantized(k, scales.k), quantized(v, scales.v)
