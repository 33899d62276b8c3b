"""Contract of the KV pool of multi-head latent attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from diptych.shared.interfaces.memory_pool import TokenToKVPool
from diptych.shared.types.attention import KVScales


class MLATokenToKVPool(TokenToKVPool):
    """The pool of multi-head latent attention: one row of kv_lora_rank + qk_rope_head_dim numbers for each
    slot and layer, `[size + page_size, 1, kv_lora_rank + qk_rope_head_dim]`.

    V is a view of K: `v_buffer` is the first kv_lora_rank columns of `k_buffer`, and shares its memory.
    `store` writes k, and does not read v. An FP8 pool stores a row over the layer's scale of K, which is that
    of V too.
    """

    kv_lora_rank: int

    @abstractmethod
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
    ) -> None: ...
