"""The KV pool of multi-head latent attention: one row for each slot and layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.interfaces import mla_memory_pool as interface
from diptych.shared.modeling.kv_pool import to_fp8
from diptych.shared.types.attention import FP8, KVScales


class MLATokenToKVPool(interface.MLATokenToKVPool):
    """A pool of one tensor for K and V: V is part of a row."""

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
        if self.dtype == FP8:
            k, _ = to_fp8(k, k, self.kv_scales[layer_id])
        self._rows[layer_id][out_cache_loc] = k.to(self.dtype)

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        self._rows[:, target_slots] = self._rows[:, source_slots]

    @property
    def num_bytes_per_token(self) -> int:
        return self.num_layers * self._rows.shape[-1] * self.dtype.itemsize
