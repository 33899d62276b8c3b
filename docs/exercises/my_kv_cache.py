"""Stage 01, the KV cache: complete the functions that raise NotImplementedError.

diptych course grade 01     # in the folder of `diptych course start`
diptych check --stage 01 my_kv_cache.py

The contract of each method is in shared/interfaces/kv_cache.py.
"""

from __future__ import annotations

import torch

from diptych.shared.interfaces import kv_cache as interface


class KVCache(interface.KVCache):
    # ---- group rows: what is kept ----

    def __init__(self, num_layers: int) -> None:
        """An empty cache of one request. Its fields are your choice."""
        raise NotImplementedError("TODO rows: where will the rows of each layer be?")

    def append(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the rows of the new tokens. k, v [num_new, num_kv_heads, head_dim]."""
        raise NotImplementedError("TODO rows: where the rows of this layer go")

    def read(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens of a layer so far: [num_rows, num_kv_heads, head_dim] each."""
        raise NotImplementedError("TODO rows: the rows of this layer")

    # ---- group steps: what is left to compute ----

    @property
    def num_tokens(self) -> int:
        """The tokens whose rows every layer has."""
        raise NotImplementedError("TODO steps: 0 in an empty cache; in the middle of a pass layers differ")

    def new_tokens(self, token_ids: list[int]) -> tuple[list[int], list[int]]:
        """Of a text: the token ids that the next pass computes, and their positions in the text."""
        raise NotImplementedError("TODO steps: first the prompt, then one token at a time")

    # ---- group attention: what is read ----

    def attend(self, layer_id: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """q [num_new, num_qo_heads, head_dim], of the newest tokens -> the same shape and dtype."""
        raise NotImplementedError("TODO attention: the formula of the toy, for several heads")
