"""How many tokens the KV pool holds."""

from __future__ import annotations

import psutil
import torch

from shared.config import EngineConfig, ModelConfig

MAX_CPU_TOKENS = 65_536
"""Enough for a laptop's worth of requests; more only on request (max_total_tokens)."""

CPU_MEMORY_FRACTION = 0.25


def kv_bytes_per_token(model_config: ModelConfig, dtype: torch.dtype) -> int:
    per_layer = 2 * model_config.num_kv_heads * model_config.head_dim
    return per_layer * model_config.num_hidden_layers * dtype.itemsize


def num_pool_tokens(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """The flag if given, else from the memory that is free *after* the weights are loaded; whole pages."""
    bytes_per_token = kv_bytes_per_token(model_config, dtype)
    if config.max_total_tokens is not None:
        num_tokens = config.max_total_tokens
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        num_tokens = int(free - total * (1.0 - config.mem_fraction_static)) // bytes_per_token
    else:
        budget = int(psutil.virtual_memory().available * CPU_MEMORY_FRACTION)
        num_tokens = min(budget // bytes_per_token, MAX_CPU_TOKENS)
    num_tokens -= num_tokens % config.page_size
    if num_tokens < config.page_size:
        raise ValueError(
            f"no room for a KV pool: {bytes_per_token} bytes a token, {num_tokens} tokens fit "
            f"(page_size {config.page_size}, max_total_tokens {config.max_total_tokens}, "
            f"mem_fraction_static {config.mem_fraction_static})"
        )
    return num_tokens
