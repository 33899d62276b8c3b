"""Planted bugs in attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.reference.attention import RequestPlan
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import AttentionLayer
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.stepped_attention import SteppedAttention, positions_of, visible_in_window


@mutant_of("attention")
class WindowOffByOne(SteppedAttention):
    """A window of w shows w tokens, the token itself included."""

    def visible(self, request: RequestPlan, layer: AttentionLayer) -> torch.Tensor:
        window = layer.sliding_window
        return visible_in_window(request, max(window - 1, 0) if window >= 0 else -1)


@mutant_of("attention")
class CapBeforeScale(SteppedAttention):
    """The soft-cap is applied to q·k, and the scale afterwards."""

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return layer.scale * self.capped(q @ keys.transpose(-1, -2), layer)


@mutant_of("attention")
class NoCap(SteppedAttention):
    """The soft-cap is ignored."""

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores


@mutant_of("attention")
class ScaleFromHeadDim(SteppedAttention):
    """The scale is head_dim ** -0.5, whatever the layer says."""

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().scores(q, keys, replace(layer, scale=layer.head_dim**-0.5))


@mutant_of("attention")
class HeadsByModulo(SteppedAttention):
    """Query head h reads KV head h % num_kv_heads."""

    def kv_heads(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.num_qo_heads) % layer.num_kv_heads


@mutant_of("attention")
class TopLeftCausal(SteppedAttention):
    """The causal mask is aligned at the top left: cached tokens shift what is seen."""

    def visible(self, request: RequestPlan, layer: AttentionLayer) -> torch.Tensor:
        if self.has_mask:
            return super().visible(request, layer)
        query_positions, key_positions = positions_of(request)
        shifted = query_positions - query_positions[:1]
        sees = key_positions <= shifted
        return sees if layer.sliding_window < 0 else sees & (key_positions >= shifted - layer.sliding_window)


@mutant_of("attention")
class DoesNotSeeItself(SteppedAttention):
    """Tokens see only those before them."""

    def visible(self, request: RequestPlan, layer: AttentionLayer) -> torch.Tensor:
        sees = super().visible(request, layer)
        if not self.has_mask:
            query_positions, key_positions = positions_of(request)
            sees = sees & ((key_positions != query_positions) | (query_positions == 0))
        return sees


@mutant_of("attention")
class BlindIsNaN(SteppedAttention):
    """A token that sees nothing gets the softmax of nothing."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = super().weights(scores, sees, layer)
        return torch.where(sees.any(-1, keepdim=True), weights, torch.nan)


@mutant_of("attention")
class BlindIsTheMean(SteppedAttention):
    """A token that sees nothing gets the mean of all values: masked by -1e9 instead of -inf."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = super().weights(scores, sees, layer)
        return torch.where(sees.any(-1, keepdim=True), weights, 1 / sees.shape[-1])


@mutant_of("attention")
class TransposedTree(SteppedAttention):
    """Among the new tokens, the mask says who is seen by whom."""

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        if forward_batch.custom_mask is not None:
            sizes = list(zip(forward_batch.extend_seq_lens_cpu, forward_batch.seq_lens_cpu))
            masks = forward_batch.custom_mask.split([new * seq_len for new, seq_len in sizes])
            turned = [mask.view(new, -1).clone() for mask, (new, _) in zip(masks, sizes)]
            for mask, (new, _) in zip(turned, sizes):
                mask[:, -new:] = mask[:, -new:].T.clone()
            custom_mask = torch.cat([mask.flatten() for mask in turned])
            forward_batch = replace(forward_batch, custom_mask=custom_mask)
        return super().plan(forward_batch)


@mutant_of("attention")
class TreeIsCausal(SteppedAttention):
    """The mask is ignored: drafts see their siblings."""

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        return super().plan(replace(forward_batch, custom_mask=None))


@mutant_of("attention")
class ReadsThePadding(SteppedAttention):
    """The slot behind a request's end is multiplied by a weight of zero: 0 * NaN."""

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        output = super()._run_request(q, layer, request)
        return output + 0.0 * self.kv_pool.v_buffer(layer.layer_id)[0, 0].to(output.dtype)


@mutant_of("attention")
class SoftmaxInHalfPrecision(SteppedAttention):
    """Scores and their softmax have the type of q."""

    def score_dtype(self, q: torch.Tensor) -> torch.dtype:
        return q.dtype


@mutant_of("attention")
class SumInHalfPrecision(SteppedAttention):
    """The softmax's sum is kept in the type of q: it stops growing."""

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        self.q_dtype = q.dtype
        return super()._run_request(q, layer, request)

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = super().weights(scores, sees, layer)
        if self.q_dtype == torch.float32 or layer.sinks is not None:
            return weights
        parts = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num()
        total = torch.zeros_like(parts[..., :1], dtype=self.q_dtype)
        for part in parts.to(self.q_dtype).split(1, dim=-1):
            total = total + part
        return weights * (parts.sum(-1, keepdim=True) / total.to(weights.dtype)).nan_to_num()


@mutant_of("attention")
class NoMaximumTakenOff(SteppedAttention):
    """exp of the scores as they are."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if layer.sinks is not None:
            total = total + layer.sinks.to(total.dtype).exp()[:, None, None]
        return (weights / total).masked_fill(~sees, 0.0)


@mutant_of("attention")
class IgnoresThePages(SteppedAttention):
    """A request's slots are taken for consecutive from its first one on."""

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        plan = super().plan(forward_batch)
        last = self.kv_pool.k_buffer(0).shape[0] - 1
        return [p._replace(slots=(p.slots[:1] + positions_of(p)[1]).clamp(max=last)) for p in plan]


@mutant_of("attention")
class OneLayerForAll(SteppedAttention):
    """Every layer reads the last layer's K and V."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q, replace(layer, layer_id=self.kv_pool.num_layers - 1), plan, **kv)


@mutant_of("attention")
class KeepsTheFirstPlan(SteppedAttention):
    """A second batch of as many tokens is run by the plan of the first."""

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        plans = self.__dict__.setdefault("plans", {})
        return plans.setdefault(forward_batch.num_tokens, super().plan(forward_batch))


@mutant_of("attention")
class OnePlanForBoth(SteppedAttention):
    """The backend beside it is itself, and it keeps one plan."""

    def beside(self) -> OnePlanForBoth:
        return self

    def plan(self, forward_batch: ForwardBatch) -> None:
        self.kept = super().plan(forward_batch)

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q, layer, self.kept, **kv)


@mutant_of("attention")
class ScalesQInPlace(SteppedAttention):
    """q is scaled where it lies."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q.mul_(layer.scale), replace(layer, scale=1.0), plan, **kv)


@mutant_of("attention")
class OutputBufferIsReused(SteppedAttention):
    """The next run overwrites what the last one gave."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        output = super().run(q, layer, plan, **kv)
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault(output.shape, torch.empty_like(output)).copy_(output)


@mutant_of("attention")
class AssumesADenseQ(SteppedAttention):
    """q is read as if its rows followed one another in memory."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q.as_strided(q.shape, (q[0].numel() if len(q) else 1, q.shape[2], 1)), layer, plan)


@mutant_of("attention")
class RefusesPlainLayers(SteppedAttention):
    """head_dim 64 is not supported, though everything must support it."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        if layer.head_dim == 64:
            raise ValueError("head_dim 64 is not supported; supported are 128 and 256")
        return super().run(q, layer, plan, **kv)
