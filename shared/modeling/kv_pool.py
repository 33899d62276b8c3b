"""The KV pool and the attention backend that a model needs, and K and V as an FP8 pool stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces import TokenToKVPool
from diptych.shared.types.attention import FP8, FP8_MAX, KVScales


def build_kv_pool(
    component: Callable[[str], Any],
    config: ModelConfig,
    size: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_scales: Sequence[KVScales] | None = None,
) -> TokenToKVPool:
    """A pool for the layers of `config`, from the chosen components. `kv_scales`: of each layer, for FP8."""
    layers = size, page_size, config.num_hidden_layers
    pool: TokenToKVPool
    if config.mla is not None:
        sizes = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
        pool = component("mla_memory_pool")(*layers, *sizes, dtype, device, kv_scales)
    else:
        pool_class = component("memory_pool").TokenToKVPool
        pool = pool_class(*layers, config.num_kv_heads, config.head_dim, dtype, device, kv_scales)
    return pool


def attention_component(config: ModelConfig) -> str:
    """The component whose implementation computes the attention of `config`."""
    return "attention" if config.mla is None else "mla_attention"


def to_fp8(k: torch.Tensor, v: torch.Tensor, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """k / scales.k and v / scales.v in FP8. k and v are not modified, because a model may read them again.
    Values are clamped before the cast, which turns larger ones into NaN in older versions of torch."""

    def quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # By a tensor: on CUDA, torch multiplies by the rounded reciprocal of a number instead.
        return (wide / wide.new_full((), scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)

    return quantized(k, scales.k), quantized(v, scales.v)
