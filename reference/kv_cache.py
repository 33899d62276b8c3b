"""The KV cache of one request: K and V of each layer in two tensors that grow by a row per token."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import kv_cache as interface


class KVCache(interface.KVCache):
    def __init__(self, num_layers: int) -> None:
        self._k: list[torch.Tensor | None] = [None] * num_layers
        self._v: list[torch.Tensor | None] = [None] * num_layers

    # --8<-- [start:new-tokens]
    @property
    def num_tokens(self) -> int:
        return min(0 if k is None else len(k) for k in self._k)

    def new_tokens(self, token_ids: list[int]) -> tuple[list[int], list[int]]:
        start = self.num_tokens
        return token_ids[start:], list(range(start, len(token_ids)))
        # --8<-- [end:new-tokens]

    # --8<-- [start:append-rows]
    def append(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._k[layer_id] = _joined(self._k[layer_id], k)
        self._v[layer_id] = _joined(self._v[layer_id], v)

    def read(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._k[layer_id], self._v[layer_id]
        assert k is not None, f"layer {layer_id} has no rows"
        assert v is not None
        return k, v
        # --8<-- [end:append-rows]

    # --8<-- [start:attend-to-rows]
    def attend(self, layer_id: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.to(dtype).transpose(0, 1) for x in self.read(layer_id))  # [num_kv_heads, num_rows, dim]
        group_size = q.shape[1] // len(k)
        k, v = (x.repeat_interleave(group_size, dim=0) for x in (k, v))  # one for each query head
        scores = scale * q.to(dtype).transpose(0, 1) @ k.transpose(1, 2)  # [num_qo_heads, num_new, num_rows]
        num_new, num_rows = scores.shape[1:]
        visible = torch.ones(num_new, num_rows, dtype=torch.bool, device=q.device)
        visible = visible.tril(num_rows - num_new)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1).to(q.dtype)
        # --8<-- [end:attend-to-rows]


def _joined(rows: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new.clone() if rows is None else torch.cat((rows, new))
