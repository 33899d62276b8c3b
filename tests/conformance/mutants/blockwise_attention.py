"""A second correct attention, cut where bugs can be planted."""

from __future__ import annotations

import torch

from reference.attention import AttentionBlock, TorchAttention
from shared.types.attention import AttentionLayer


class BlockwiseAttention(TorchAttention):
    """Attention of one block, written out for bugs to be planted in: each method is one decision."""

    def _run_block(self, q: torch.Tensor, layer: AttentionLayer, block: AttentionBlock) -> torch.Tensor:
        bs, num_queries, dtype = block.slots.shape[0], block.num_queries, self.score_dtype(q)
        q = q.view(bs, num_queries, layer.num_qo_heads, layer.head_dim).transpose(1, 2)
        heads = self.kv_heads(layer).to(q.device)
        keys = self.kv_pool.k_buffer(layer.layer_id)[block.slots][:, :, heads].transpose(1, 2)
        values = self.kv_pool.v_buffer(layer.layer_id)[block.slots][:, :, heads].transpose(1, 2)
        scores = self.scores(q.to(dtype), keys.to(dtype), layer)
        sees = self.visible(block, layer)[:, None]
        weights = self.weights(scores.masked_fill(~sees, -torch.inf), sees, layer)
        output = weights @ self.values(values.to(weights.dtype), sees, weights)
        return output.transpose(1, 2).reshape(-1, layer.num_qo_heads, layer.head_dim).to(q.dtype)

    def score_dtype(self, q: torch.Tensor) -> torch.dtype:
        return torch.float32

    def kv_heads(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.num_qo_heads) // (layer.num_qo_heads // layer.num_kv_heads)

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scores = layer.scale * (q @ keys.transpose(-1, -2))
        return self.capped(scores, layer)

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return layer.logit_cap * torch.tanh(scores / layer.logit_cap) if layer.logit_cap > 0 else scores

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        return block.visible(layer.sliding_window)

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.sinks is not None:
            sinks = layer.sinks.to(scores.dtype)[None, :, None, None]
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : sees.shape[-1]]
        return weights.masked_fill(~sees, 0.0)

    def values(self, values: torch.Tensor, sees: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return values
