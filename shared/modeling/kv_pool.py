"""The KV pool and the attention backend that a model needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared.config import ModelConfig
from shared.interfaces import TokenToKVPool
from shared.types.attention import KVScales


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
        if dtype.itemsize == 1:
            raise ValueError(f"a KV pool of {dtype} is not supported for {config.architecture}: 16 bits are")
        sizes = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
        pool = component("mla_memory_pool")(*layers, *sizes, dtype, device)
    else:
        pool_class = component("memory_pool").TokenToKVPool
        pool = pool_class(*layers, config.num_kv_heads, config.head_dim, dtype, device, kv_scales)
    return pool


def attention_component(config: ModelConfig) -> str:
    """The component whose implementation computes the attention of `config`."""
    return "attention" if config.mla is None else "mla_attention"
