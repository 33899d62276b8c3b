"""The KV pool and the attention backend that a model needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shared.config import ModelConfig
from shared.interfaces import TokenToKVPool


def build_kv_pool(
    component: Callable[[str], Any],
    config: ModelConfig,
    size: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TokenToKVPool:
    """A pool for the layers of `config`, from the chosen components."""
    if config.mla is not None:
        pool_class = component("mla_memory_pool")
        sizes = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
    else:
        pool_class = component("memory_pool").TokenToKVPool
        sizes = config.num_kv_heads, config.head_dim
    pool: TokenToKVPool = pool_class(size, page_size, config.num_hidden_layers, *sizes, dtype, device)
    return pool


def attention_component(config: ModelConfig) -> str:
    """The component whose implementation computes the attention of `config`."""
    return "attention" if config.mla is None else "mla_attention"
