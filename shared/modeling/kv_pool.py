"""The KV pool and the attention backend that a model needs, the tensors of a pool, and K and V as an FP8 pool
stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.config.model import KVHeads
from diptych.shared.interfaces import MLATokenToKVPool, TokenToKVPool
from diptych.shared.types.attention import FP8, FP8_TYPES, KVScales


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
    layers = size, page_size, config.num_kv_layers
    pool: TokenToKVPool
    if config.mla is not None:
        sizes = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
        pool = component("mla_memory_pool")(*layers, *sizes, dtype, device, kv_scales)
    else:
        pool_class = component("memory_pool").TokenToKVPool
        if config.kv_heads:
            heads = [config.kv_heads[layer_id] for layer_id in config.kv_layers]
            return PoolBySize(pool_class, size, page_size, heads, dtype, device, kv_scales)
        pool = pool_class(*layers, config.num_kv_heads, config.head_dim, dtype, device, kv_scales)
    return pool


def attention_component(config: ModelConfig) -> str:
    """The component whose implementation computes the attention of `config`."""
    return "attention" if config.mla is None else "mla_attention"


def to_fp8(
    k: torch.Tensor, v: torch.Tensor, scales: KVScales, dtype: torch.dtype = FP8
) -> tuple[torch.Tensor, torch.Tensor]:
    """k / scales.k and v / scales.v in a type of `FP8_TYPES`. k and v are not modified, because a model may
    read them again. Values are clamped before the cast, which turns larger ones into infinity, or NaN where
    the type has none."""
    largest = FP8_TYPES[dtype]

    def quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # By a tensor: on CUDA, torch multiplies by the rounded reciprocal of a number instead.
        return (wide / wide.new_full((), scale)).clamp(-largest, largest).to(dtype)

    return quantized(k, scales.k), quantized(v, scales.v)


class KVTensors(TokenToKVPool):
    """A pool's K and V of all layers, each in one tensor [num_layers, slots, num_kv_heads, head_dim]. A panel
    adds the other methods."""

    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.num_layers = num_layers
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_scales = kv_scales or [KVScales()] * num_layers
        shape = (num_layers, size + page_size, num_kv_heads, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes_per_token(self) -> int:
        num_layers, _, num_kv_heads, head_dim = self._k.shape
        return 2 * num_layers * num_kv_heads * head_dim * self.dtype.itemsize


class PoolBySize(TokenToKVPool):
    """Layers whose heads differ in number or size: layers alike are in one pool of `pool_class`, and the same
    slots are in all pools."""

    def __init__(
        self,
        pool_class: type[TokenToKVPool],
        size: int,
        page_size: int,
        heads: Sequence[KVHeads],
        dtype: torch.dtype,
        device: torch.device | str,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        self.size, self.page_size, self.num_layers = size, page_size, len(heads)
        self.dtype, self.device = dtype, torch.device(device)
        self.kv_scales = kv_scales or [KVScales()] * len(heads)
        self.pools: list[TokenToKVPool] = []
        self._places: dict[int, tuple[TokenToKVPool, int]] = {}  # layer -> its pool, and its number there
        # --8<-- [start:pool-by-size]
        for kind in dict.fromkeys(heads):
            alike = [layer_id for layer_id, own in enumerate(heads) if own == kind]
            scales = [self.kv_scales[layer_id] for layer_id in alike]
            pool = pool_class(size, page_size, len(alike), *kind, dtype, device, scales)
            self.pools.append(pool)
            self._places |= {layer_id: (pool, number) for number, layer_id in enumerate(alike)}
        # --8<-- [end:pool-by-size]

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        pool, number = self._places[layer_id]
        return pool.k_buffer(number)

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        pool, number = self._places[layer_id]
        return pool.v_buffer(number)

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pool, number = self._places[layer_id]
        pool.store(number, out_cache_loc, k, v)

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        for pool in self.pools:
            pool.move(target_slots, source_slots)

    @property
    def num_bytes_per_token(self) -> int:
        return sum(pool.num_bytes_per_token for pool in self.pools)


class MLARows(MLATokenToKVPool):
    """A pool of one tensor for K and V, [num_layers, slots, 1, row_size]: V is part of a row. A panel adds
    `move`."""

    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.num_layers = num_layers
        self.kv_lora_rank = kv_lora_rank
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_scales = kv_scales or [KVScales()] * num_layers
        shape = (num_layers, size + page_size, 1, kv_lora_rank + qk_rope_head_dim)
        self._rows = torch.zeros(shape, dtype=dtype, device=device)

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        return self._rows[layer_id]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self._rows[layer_id][..., : self.kv_lora_rank]

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.dtype in FP8_TYPES:
            k, _ = to_fp8(k, k, self.kv_scales[layer_id], self.dtype)
        self._rows[layer_id][out_cache_loc] = k.to(self.dtype)

    @property
    def num_bytes_per_token(self) -> int:
        return self.num_layers * self._rows.shape[-1] * self.dtype.itemsize
