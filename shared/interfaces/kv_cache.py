"""Contract of a KV cache: K and V of one request, of all layers, in the order of positions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class KVCache(ABC):
    """The simplest KV cache: one request, no pages, no sharing. A forward pass over some new tokens calls, in
    each layer, `append` with their K and V and then `attend` with their queries.

    The rows of a layer are in the order of positions: row p is of the token at position p. Layers do not
    share rows. In the middle of a pass the first layers have more rows than the last ones.
    """

    @abstractmethod
    def __init__(self, num_layers: int) -> None:
        """An empty cache."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """The tokens whose K and V every layer has."""

    @abstractmethod
    def new_tokens(self, token_ids: list[int]) -> tuple[list[int], list[int]]:
        """What the next forward pass computes of a text: (token ids, their positions). These are the tokens
        behind the first `num_tokens`. At least one is left."""

    @abstractmethod
    def append(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add rows to a layer. k, v [num_new, num_kv_heads, head_dim]: of the next positions. They are
        copied: the caller may overwrite them."""

    @abstractmethod
    def read(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer that has rows: [num_rows, num_kv_heads, head_dim] each, in the dtype in which
        they came."""

    @abstractmethod
    def attend(self, layer_id: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """q [num_new, num_qo_heads, head_dim], of the last num_new rows of the layer -> the same shape and
        dtype. Each query attends to the rows up to its own (causal): softmax(scale * q·k) of the rows'
        values, in float32 at least. Query head h reads KV head h // (num_qo_heads // num_kv_heads)."""
