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
    """The flag if given, else from the memory that is free *after* the weights are loaded, at most what all
    running requests can fill; in whole pages."""
    bytes_per_token = kv_bytes_per_token(model_config, dtype)
    if config.max_total_tokens is not None:
        num_tokens = config.max_total_tokens
        found = f"max_total_tokens is {num_tokens}"
    else:
        budget, found = _free_bytes(config, device)
        most = config.max_running_requests * (config.context_len or model_config.context_len)
        num_tokens = min(max(budget, 0) // bytes_per_token, most)
        if device.type != "cuda":
            num_tokens = min(num_tokens, MAX_CPU_TOKENS)
    num_tokens -= num_tokens % config.page_size
    if num_tokens < config.page_size:
        raise ValueError(
            f"no room for a KV pool: a page of {config.page_size} tokens takes "
            f"{config.page_size * bytes_per_token} bytes, and {found}"
        )
    return num_tokens


def _free_bytes(config: EngineConfig, device: torch.device) -> tuple[int, str]:
    """Bytes for the pool, and how that number came about."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1.0 - config.mem_fraction_static))
        return budget, (
            f"of {total / 2**30:.1f} GiB on the GPU {free / 2**30:.1f} are free, and mem_fraction_static "
            f"({config.mem_fraction_static}) leaves {max(budget, 0) / 2**30:.1f} for it"
        )
    available = psutil.virtual_memory().available
    budget = int(available * CPU_MEMORY_FRACTION)
    return budget, f"{CPU_MEMORY_FRACTION:.0%} of the {available / 2**30:.1f} GiB available are for it"
