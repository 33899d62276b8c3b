"""The pools of an engine: how much memory they get, and the prefix cache over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.shared.engine.build.features import Extras, Features, Pools
from diptych.shared.engine.build.plan import Plan
from diptych.shared.interfaces import (
    CausalLM,
    TokenToKVPool,
)
from diptych.shared.loading.kv_sizing import (
    MemoryPlan,
    free_gpu_memory,
    num_rows,
    num_speculative_slots,
    plan_memory,
)
from diptych.shared.loading.pipeline_stages import own_layers
from diptych.shared.modeling.kv_pool import build_kv_pool
from diptych.shared.scheduling.host_cache import tiered


def make_pools(plan: Plan, features: Features, model: CausalLM, extras: Extras, free_before: int) -> Pools:
    """Divide the memory that is free now. `free_before`: bytes that were free before the weights."""
    config, drafter = plan.config, extras.drafter
    memory = size_pools(plan, model, extras, free_before)
    pools = features.component("memory_pool")
    assert config.context_len is not None
    row_len = config.context_len
    if drafter is not None:
        row_len += num_speculative_slots(config, drafter)
    req_to_token_pool = pools.ReqToTokenPool(num_rows(config), row_len, plan.device)
    allocator = pools.TokenToKVPoolAllocator(memory.num_tokens, config.page_size, plan.device)
    kv_pool = make_kv_pool(plan, features, memory.num_tokens)
    tiers = (feature.host_tier(kv_pool, extras) for feature in features.features)
    host = next((tier for tier in tiers if tier is not None), None)
    cache_class = features.component("chunk_cache" if config.disable_radix_cache else "radix_cache")
    tree_cache = (cache_class if host is None else tiered(cache_class, host))(
        config.page_size,
        allocator,
        req_to_token_pool,
        config.eviction_policy,
        is_bigram=drafter is not None and drafter.is_bigram,
    )
    if drafter is not None:
        drafter.allocate(req_to_token_pool, memory.num_tokens)
    return Pools(memory, req_to_token_pool, allocator, kv_pool, tree_cache, host)


def size_pools(plan: Plan, model: CausalLM, extras: Extras, free_before: int) -> MemoryPlan:
    """How many tokens the KV pool has: on every rank as many as on the rank with the least memory."""
    device, ranks = plan.device, plan.ranks
    free_gpu_memory(device)  # temporary memory of loading does not count as weights
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    draft_bytes = extras.drafter.num_kv_bytes_per_token if extras.drafter is not None else 0
    memory = plan_memory(
        plan.config,
        plan.local_config,
        plan.dtype,
        device,
        free_before,
        weight_bytes,
        draft_bytes,
        plan.kv_dtype,
    )
    if device.type == "cuda" and (ranks is None or ranks.rank == 0):
        print_memory(memory)
    if ranks is None:
        return memory
    if plan.config.max_total_tokens is None:
        check_equal_memory(ranks.all_gather(torch.tensor([free_before])).tolist())
    num_tokens = int(ranks.all_gather(torch.tensor([memory.num_tokens])).min())
    return replace(memory, num_tokens=num_tokens)


MAX_DIFFERENCE = 2 * 2**30
"""Of the free memory of two ranks. Without max_total_tokens the least bounds the pool of all."""


def check_equal_memory(free: Sequence[int]) -> None:
    """Raise `ValueError` if another process uses the memory of some ranks' GPUs. `free`: bytes of each rank,
    before the weights."""
    if max(free) - min(free) > MAX_DIFFERENCE:
        each = ", ".join(f"rank {rank}: {num_bytes / 2**30:.1f} GiB" for rank, num_bytes in enumerate(free))
        raise ValueError(
            f"free memory differs between ranks ({each}): the smallest would bound the KV pool of all. End "
            f"what uses these GPUs, or choose equal ones"
        )


def make_kv_pool(plan: Plan, features: Features, num_tokens: int) -> TokenToKVPool:
    scales = plan.kv_scales
    if scales is not None:
        layers = own_layers(plan.model_config, plan.config, plan.ranks)
        scales = scales[layers.start : layers.stop]
    return build_kv_pool(
        features.component,
        plan.local_config,
        num_tokens,
        plan.config.page_size,
        plan.kv_dtype,
        plan.device,
        scales,
    )


def print_memory(memory: MemoryPlan) -> None:
    """Print the use of GPU memory when an engine starts."""
    from rich.console import Console
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in memory.rows().items():
        grid.add_row(name, value)
    Console(stderr=True, highlight=False).print(grid)
