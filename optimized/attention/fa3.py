"""Attention by FlashInfer's kernels for Hopper GPUs: FlashAttention 3 for prefill.

Differs from reference: prefill runs in warp-specialized kernels that keep the tensor cores busy while softmax
is computed. Decoding is bandwidth bound, and these kernels have no masks of drafts: both run in
FlashAttention 2. Assumes compute capability 9.0 (H100, H200).
"""

from __future__ import annotations

import torch

from diptych.optimized.attention.flashinfer import FlashInferAttention
from diptych.shared.types.attention import FP8_TYPES


class FA3Attention(FlashInferAttention):
    """Supports what FlashInferAttention supports, on Hopper GPUs, except FP8 pools: these kernels need q in
    FP8 too, without a scale."""

    kernels = "fa3"

    @staticmethod
    def check_device(device: torch.device) -> None:
        FlashInferAttention.check_device(device)
        major, minor = torch.cuda.get_device_capability(device)
        if major != 9:
            raise ValueError(
                f"device of compute capability {major}.{minor}: not supported; FA3Attention supports Hopper "
                "GPUs (9.0), and attention=flashinfer supports this one"
            )

    def _check_pool_dtype(self, dtype: torch.dtype) -> None:
        if dtype in FP8_TYPES:
            raise ValueError(
                f"FA3Attention supports kv_cache_dtype=auto, not a pool of {dtype}; attention=triton does"
            )
        super()._check_pool_dtype(dtype)
