"""Contract of an attention backend for multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.interfaces.attention import AttentionBackend
from diptych.shared.types.attention import AttentionLayer


class MLAAttentionBackend(AttentionBackend):
    """Attention over a pool of latent rows (`MLATokenToKVPool`), for layers of type `MLALayer`. Which tokens
    see which, plans and CUDA graphs are as in `AttentionBackend`.

    Slot s holds a row [c | k_r]. Head h has the key [W_k c | k_r] and the value W_v c, with the layer's
    `w_k[h]` and `w_v[h]`. score = scale * q·k; k_r, and the last numbers of q, are rotated already.

    Two forms give the same result. *Expanded*: make keys and values of all heads, then attend. *Absorbed*:
    multiply q by W_k, attend to the rows themselves, as one KV head for all query heads, and multiply the
    weighted sum of the c by W_v. A backend may use either for any batch: they differ by rounding.

    Every backend takes float16 and bfloat16, kv_lora_rank 512 and qk_rope_head_dim 64 with up to 128 query
    heads, and any page size, causal. What else it cannot do (dtype, kv_lora_rank, qk_rope_head_dim,
    num_qo_heads, page_size, custom_mask, tree_mask) it refuses by a `ValueError` that names that and what it
    supports.
    """

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [num_tokens, num_qo_heads, head_dim] -> [num_tokens, num_qo_heads, v_head_dim] of q's dtype.

        k, when given, is the new tokens' rows [num_tokens, 1, row_size], which the pool already holds at
        out_cache_loc; v is not read. `out` as in `AttentionBackend.run`, of the output's shape."""
        raise NotImplementedError
