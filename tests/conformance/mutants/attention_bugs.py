"""Planted bugs in attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from reference.attention import AttentionBlock, AttentionPlan
from shared.types import ForwardBatch
from shared.types.attention import AttentionLayer
from tests.conformance.mutants.blockwise_attention import BlockwiseAttention
from tests.conformance.mutants.mutant import mutant_of


@mutant_of("attention")
class WindowOffByOne(BlockwiseAttention):
    """A window of w shows w tokens, the token itself included."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        window = layer.sliding_window
        return block.visible(max(window - 1, 0) if window >= 0 else -1)


@mutant_of("attention")
class WindowZeroIsNone(BlockwiseAttention):
    """A window of 0 is taken for no window."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        return block.visible(layer.sliding_window or -1)


@mutant_of("attention")
class WindowIgnoresTheMask(BlockwiseAttention):
    """With a mask given, the window is forgotten."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        return block.visible(layer.sliding_window if block.custom_mask is None else -1)


@mutant_of("attention")
class CapBeforeScale(BlockwiseAttention):
    """The soft-cap is applied to q·k, and the scale afterwards."""

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return layer.scale * self.capped(q @ keys.transpose(-1, -2), layer)


@mutant_of("attention")
class NoCap(BlockwiseAttention):
    """The soft-cap is ignored."""

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores


@mutant_of("attention")
class ScaleFromHeadDim(BlockwiseAttention):
    """The scale is head_dim ** -0.5, whatever the layer says."""

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().scores(q, keys, replace(layer, scale=layer.head_dim**-0.5))


@mutant_of("attention")
class SinksInTheNumerator(BlockwiseAttention):
    """The sink's weight counts for the first key, whose value it adds."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = super().weights(scores, sees, layer)
        if layer.sinks is not None:
            weights[..., 0] += 1 - weights.sum(-1)
        return weights


@mutant_of("attention")
class SinksTakeNothing(BlockwiseAttention):
    """Sinks are ignored."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(scores, sees, replace(layer, sinks=None))


@mutant_of("attention")
class SinksAreScaled(BlockwiseAttention):
    """The sink's logit is scaled like a score."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.sinks is not None:
            layer = replace(layer, sinks=layer.sinks * layer.scale)
        return super().weights(scores, sees, layer)


@mutant_of("attention")
class OneSinkForAll(BlockwiseAttention):
    """All heads of a group use their first head's sink."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.sinks is not None:
            group = layer.num_qo_heads // layer.num_kv_heads
            layer = replace(layer, sinks=layer.sinks[::group].repeat_interleave(group))
        return super().weights(scores, sees, layer)


@mutant_of("attention")
class HeadsByModulo(BlockwiseAttention):
    """Query head h reads KV head h % num_kv_heads."""

    def kv_heads(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.num_qo_heads) % layer.num_kv_heads


@mutant_of("attention")
class TopLeftCausal(BlockwiseAttention):
    """The causal mask is aligned at the top left: cached tokens shift what is seen."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        if block.custom_mask is None:
            shifted = block.query_positions - block.query_positions[:, :1]
            block = replace(block, query_positions=shifted)
        return block.visible(layer.sliding_window)


@mutant_of("attention")
class DoesNotSeeItself(BlockwiseAttention):
    """Tokens see only those before them."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        sees = block.visible(layer.sliding_window)
        if block.custom_mask is None:
            itself = block.key_positions[:, None] == block.query_positions[:, :, None]
            sees = sees & (~itself | (block.query_positions[:, :, None] == 0))
        return sees


@mutant_of("attention")
class BlindIsNaN(BlockwiseAttention):
    """A token that sees nothing gets the softmax of nothing."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = super().weights(scores, sees, layer)
        return torch.where(sees.any(-1, keepdim=True), weights, torch.nan)


@mutant_of("attention")
class BlindIsTheMean(BlockwiseAttention):
    """A token that sees nothing gets the mean of all values: masked by -1e9 instead of -inf."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = super().weights(scores, sees, layer)
        return torch.where(sees.any(-1, keepdim=True), weights, 1 / sees.shape[-1])


@mutant_of("attention")
class TransposedTree(BlockwiseAttention):
    """Among the new tokens, the mask says who is seen by whom."""

    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
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
class TreeForgetsThePrefix(BlockwiseAttention):
    """A tree's tokens see each other and nothing that is cached."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        sees = block.visible(layer.sliding_window)
        if block.custom_mask is not None:
            sees = sees & (block.key_positions[:, None] >= block.query_positions[:, :1, None])
        return sees


@mutant_of("attention")
class TreeIsCausal(BlockwiseAttention):
    """The mask is ignored: drafts see their siblings."""

    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        return super().plan(replace(forward_batch, custom_mask=None))


@mutant_of("attention")
class OneMaskForAll(BlockwiseAttention):
    """Every request reads the first one's mask."""

    def visible(self, block: AttentionBlock, layer: AttentionLayer) -> torch.Tensor:
        if block.custom_mask is not None:
            block = replace(block, custom_mask=block.custom_mask[:1].expand_as(block.custom_mask))
        return block.visible(layer.sliding_window)


@mutant_of("attention")
class ReadsThePadding(BlockwiseAttention):
    """Slots behind a request's end are multiplied by a weight of zero: 0 * NaN."""

    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        plan = super().plan(forward_batch)
        blocks = []
        for block in plan.blocks:
            behind = block.key_positions > block.query_positions[:, -1:]
            blocks.append(replace(block, slots=block.slots.masked_fill(behind, 0)))
        return AttentionPlan(blocks)


@mutant_of("attention")
class SoftmaxInHalfPrecision(BlockwiseAttention):
    """Scores and their softmax have the type of q."""

    def score_dtype(self, q: torch.Tensor) -> torch.dtype:
        return q.dtype


@mutant_of("attention")
class SumInHalfPrecision(BlockwiseAttention):
    """The softmax's sum is kept in the type of q: it stops growing."""

    def _run_block(self, q: torch.Tensor, layer: AttentionLayer, block: AttentionBlock) -> torch.Tensor:
        self.q_dtype = q.dtype
        return super()._run_block(q, layer, block)

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
class NoMaximumTakenOff(BlockwiseAttention):
    """exp of the scores as they are."""

    def weights(self, scores: torch.Tensor, sees: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if layer.sinks is not None:
            total = total + layer.sinks.to(total.dtype).exp()[None, :, None, None]
        return (weights / total).masked_fill(~sees, 0.0)


@mutant_of("attention")
class IgnoresThePages(BlockwiseAttention):
    """A request's slots are taken for consecutive from its first one on."""

    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        plan = super().plan(forward_batch)
        last = self.kv_pool.k_buffer(0).shape[0] - 1
        return AttentionPlan(
            [
                replace(block, slots=(block.slots[:, :1] + block.key_positions).clamp(max=last))
                for block in plan.blocks
            ]
        )


@mutant_of("attention")
class PlanReadsTheValues(BlockwiseAttention):
    """K and V are gathered by plan, before the new tokens' are stored."""

    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        self.gathered = [
            (self.kv_pool.k_buffer(i).clone(), self.kv_pool.v_buffer(i).clone())
            for i in range(self.kv_pool.num_layers)
        ]
        return super().plan(forward_batch)

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        pool, self.kv_pool = self.kv_pool, Gathered(self.gathered)
        try:
            return super().run(q, layer, plan, **kv)
        finally:
            self.kv_pool = pool


class Gathered:
    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.layers = layers

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        return self.layers[layer_id][0]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self.layers[layer_id][1]


@mutant_of("attention")
class OneLayerForAll(BlockwiseAttention):
    """Every layer reads the last layer's K and V."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q, replace(layer, layer_id=self.kv_pool.num_layers - 1), plan, **kv)


@mutant_of("attention")
class KeepsTheFirstPlan(BlockwiseAttention):
    """A second batch of as many tokens is run by the plan of the first."""

    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        plans = self.__dict__.setdefault("plans", {})
        return plans.setdefault(forward_batch.num_tokens, super().plan(forward_batch))


@mutant_of("attention")
class ScalesQInPlace(BlockwiseAttention):
    """q is scaled where it lies."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q.mul_(layer.scale), replace(layer, scale=1.0), plan, **kv)


@mutant_of("attention")
class OutputBufferIsReused(BlockwiseAttention):
    """The next run overwrites what the last one gave."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        output = super().run(q, layer, plan, **kv)
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault(output.shape, torch.empty_like(output)).copy_(output)


@mutant_of("attention")
class LeavesRowsUnwritten(BlockwiseAttention):
    """The last row of the output is left as the allocator gave it."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        output = super().run(q, layer, plan, **kv)
        if len(output) > 64:
            output[-1] = torch.empty_like(output[-1])
        return output


@mutant_of("attention")
class AssumesADenseQ(BlockwiseAttention):
    """q is read as if its rows followed one another in memory."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q.as_strided(q.shape, (q[0].numel() if len(q) else 1, q.shape[2], 1)), layer, plan)


@mutant_of("attention")
class RefusesPlainLayers(BlockwiseAttention):
    """head_dim 64 is not supported, though everything must support it."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        if layer.head_dim == 64:
            raise ValueError("head_dim 64 is not supported; supported are 128 and 256")
        return super().run(q, layer, plan, **kv)


@mutant_of("attention")
class RefusesWithoutAWord(BlockwiseAttention):
    """sinks are refused without saying so."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        if layer.sinks is not None:
            raise ValueError("unsupported layer")
        return super().run(q, layer, plan, **kv)
