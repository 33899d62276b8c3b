"""A second correct attention, cut into steps in which bugs are planted."""

from __future__ import annotations

import torch

from diptych.reference.attention import RequestPlan, TorchAttention
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import AttentionLayer, KVScales


class SteppedAttention(TorchAttention):
    """One method for each decision. Scores are [num_qo_heads, num_queries, num_keys]."""

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        self.has_mask = forward_batch.custom_mask is not None
        return super().plan(forward_batch)

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        dtype = self.score_dtype(q)
        sees = self.visible(request, layer)
        heads = self.kv_heads(layer).to(q.device)
        buffers = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
        keys, values = (
            (buffer[request.slots].to(torch.float32) * scale)[:, heads].transpose(0, 1)
            for buffer, scale in zip(buffers, self.kv_scales(layer))
        )
        scores = self.scores(q.transpose(0, 1).to(dtype), keys.to(dtype), layer)
        weights = self.weights(scores.masked_fill(~sees, -torch.inf), sees, layer)
        return (weights @ values.to(weights.dtype)).transpose(0, 1).to(q.dtype)

    def kv_scales(self, layer: AttentionLayer) -> KVScales:
        return self.kv_pool.kv_scales[layer.layer_id]

    def score_dtype(self, q: torch.Tensor) -> torch.dtype:
        return torch.float32

    def kv_heads(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.num_qo_heads) // (layer.num_qo_heads // layer.num_kv_heads)

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scores = layer.scale * (q @ keys.transpose(-1, -2))
        return self.capped(scores, layer)

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return layer.logit_cap * torch.tanh(scores / layer.logit_cap) if layer.logit_cap > 0 else scores

    def visible(self, request: RequestPlan, layer: AttentionLayer) -> torch.Tensor:
        return visible_in_window(request, layer.sliding_window)

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.sinks is not None:
            sinks = layer.sinks.to(scores.dtype)[:, None, None]
            scores = torch.cat([scores, sinks.expand(*scores.shape[:2], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : sees.shape[-1]]
        return weights.masked_fill(~sees, 0.0)


def positions_of(request: RequestPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the queries, [num_queries, 1], and of the keys, [num_keys] or for each query."""
    if request.key_positions is not None:
        return request.key_positions[:, -1:], request.key_positions
    num_queries, num_keys = request.visible.shape
    key_positions = torch.arange(num_keys, device=request.slots.device)
    return key_positions[num_keys - num_queries :, None], key_positions


def visible_in_window(request: RequestPlan, sliding_window: int) -> torch.Tensor:
    """bool [num_queries, num_keys]; -1: no window."""
    if sliding_window < 0:
        return request.visible
    query_positions, key_positions = positions_of(request)
    return request.visible & (key_positions >= query_positions - sliding_window)
