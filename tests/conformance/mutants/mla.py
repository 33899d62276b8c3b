"""Planted bugs in multi-head latent attention: the pool, both forms, and what a config says of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from diptych.reference.mla.mla_attention import AbsorbedMLA, ExpandedMLA
from diptych.reference.mla.mla_memory_pool import MLATokenToKVPool
from diptych.shared.modeling.mla import expand
from diptych.shared.tools.conformance.oracles.replanned_attention import RaggedPlan, _replanned
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import AttentionLayer, KVScales, MLALayer
from tests.conformance.mutants.mutant import bugs_in, mutant_of


@mutant_of("mla_memory_pool")
class VIsACopy(MLATokenToKVPool):
    """V is a copy of K, made when it is asked for: what is written to K later is missing."""

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return super().v_buffer(layer_id).clone()


@mutant_of("mla_memory_pool")
class VIsTheEnd(MLATokenToKVPool):
    """V is the last columns of K, the rotated key among them."""

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self._rows[layer_id][..., -self.kv_lora_rank :]


@mutant_of("mla_memory_pool")
class StoresV(MLATokenToKVPool):
    """store also writes v, over what it has written of k."""

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(layer_id, out_cache_loc, k, v)
        self.v_buffer(layer_id).index_copy_(0, out_cache_loc, v.to(self.dtype))


@mutant_of("mla_memory_pool")
class MovesInOrder(MLATokenToKVPool):
    """move copies slot after slot: a source may be overwritten before it is read."""

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        for target, source in zip(target_slots.tolist(), source_slots.tolist()):
            self._rows[:, target] = self._rows[:, source]


@mutant_of("mla_memory_pool")
class CountsVToo(MLATokenToKVPool):
    """num_bytes_per_token counts V beside K."""

    @property
    def num_bytes_per_token(self) -> int:
        return self.num_layers * (self._rows.shape[-1] + self.kv_lora_rank) * self.dtype.itemsize


@mutant_of("mla_memory_pool")
class StoresFp8Unscaled(MLATokenToKVPool):
    """An FP8 pool stores rows as they are, not over the layer's scale."""

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        scales = self.kv_scales
        self.kv_scales = [KVScales()] * self.num_layers
        super().store(layer_id, out_cache_loc, k, v)
        self.kv_scales = scales


@mutant_of("mla_attention")
class ScoresUnscaledRows(AbsorbedMLA):
    """The scale of FP8 rows multiplies the weighted sums, and not the scores."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super()._keys_and_values(layer, slots)
        return k / self.kv_pool.kv_scales[layer.layer_id].k, v


@mutant_of("mla_attention")
class ScaleOfAnotherLayer(ExpandedMLA):
    """FP8 rows are multiplied by the scale of the first layer."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.kv_pool.k_buffer(layer.layer_id)[slots].float()
        return expand(rows * self.kv_pool.kv_scales[0].k, cast(MLALayer, layer))


@mutant_of("mla_attention")
class KeepsTheLengthsOfItsPlan(_replanned(ExpandedMLA)):  # type: ignore[misc]
    """In graphs requests are as long as when the plan was made."""

    def plan_ragged(self, forward_batch: ForwardBatch) -> RaggedPlan:
        return RaggedPlan(replace(forward_batch, seq_lens=forward_batch.seq_lens.clone()))


@mutant_of("mla_attention")
class ScaleOfTheRow(AbsorbedMLA):
    """Scores are scaled by the size of a row, not by that of a head of q."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        mla = cast(MLALayer, layer)
        scale = layer.scale * (layer.head_dim / mla.absorbed.head_dim) ** 0.5
        return super().run(q, replace(mla, scale=scale), plan, **kv)


@mutant_of("mla_attention")
class RotatedPartForgotten(ExpandedMLA):
    """The rotated key is left out of the keys."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super()._keys_and_values(layer, slots)
        k[..., cast(MLALayer, layer).qk_nope_head_dim :] = 0.0
        return k, v


@mutant_of("mla_attention")
class HalvesOfKvBExchanged(ExpandedMLA):
    """The rows of kv_b_proj are taken for those of all keys, then of all values, and not head by head."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mla = cast(MLALayer, layer)
        rows = self.kv_pool.k_buffer(layer.layer_id)[slots].float()
        c, k_rope = rows.split([mla.kv_lora_rank, rows.shape[-1] - mla.kv_lora_rank], dim=-1)
        weight = cast(torch.Tensor, mla.kv_b_proj.weight).float()
        k, v = (c[:, 0] @ weight.T).split(
            [mla.num_qo_heads * mla.qk_nope_head_dim, mla.num_qo_heads * mla.v_head_dim], dim=-1
        )
        k = k.unflatten(-1, (mla.num_qo_heads, -1))
        k = torch.cat((k, k_rope.expand(-1, mla.num_qo_heads, -1)), dim=-1)
        return k, v.unflatten(-1, (mla.num_qo_heads, -1))


@mutant_of("mla_attention")
class ExpandsTheFirstRequest(ExpandedMLA):
    """Keys are expanded from the slots from the first one on, as if a request's rows lay densely."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dense = slots[:1] + torch.arange(len(slots), device=slots.device)
        rows = self.kv_pool.k_buffer(layer.layer_id)
        return expand(rows[dense % len(rows)].float(), cast(MLALayer, layer))


@mutant_of("mla_attention")
class ProjectsInHalfPrecision(AbsorbedMLA):
    """q and the weighted sums are rounded to 8 bits of mantissa on the way."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        return super().run(q.bfloat16().to(q.dtype), layer, plan, **kv).bfloat16().to(q.dtype)


bug = bugs_in("mla_attention", "reference.mla.mla_attention:ExpandedMLA", folder="reference.")
# fmt: off
bug("RefusesIdleSteps", "A step without requests is refused.",
    ("attention", "plans: list[RequestPlan] = []",
     "plans: list[RequestPlan] = []\n        assert len(forward_batch.seq_lens)"))
bug("BlindBeforeTheTree", "Nodes of a tree do not see the keys before it.",
    ("attention", "0), value=True)", "0), value=False)"))
bug("EveryRequestHasTheFirstMask", "All requests read the mask from its beginning.",
    ("attention", "            start = end\n", "            pass\n"))
bug("BlindIsNaN", "A query without a visible key is NaN.",
    ("attention", "weights = weights.masked_fill(~visible, 0.0)", "pass"))
bug("KeysOfTheTimeOfItsPlan", "Rows that are stored after the plan are not read.",
    ("attention",
     "plans: list[RequestPlan] = []",
     'plans: list[RequestPlan] = []\n        self.live = getattr(self, "live", self.kv_pool)\n        '
     'self.kv_pool = __import__("copy").deepcopy(self.live)'))
bug("RefusesGivenRows", "The rows of this step are read from the pool, and must not be given.",
    ("attention", "output = attention_output(q, layer, out)",
     "output = attention_output(q, layer, out)\n        assert k is None"))
bug("ScalesQueriesInPlace", "q is multiplied by the scale in place.",
    ("attention", "(q.to(dtype) * layer.scale)", "q.mul_(layer.scale).to(dtype)"))
bug("RowsOfTheFirstLayer", "All layers read the rows of the first.",
    ("attention", "pool.k_buffer(layer.layer_id)[slots]", "pool.k_buffer(0)[slots]"))
bug("KeepsItsFirstPlan", "Every plan is the first one.",
    ("attention",
     "plans: list[RequestPlan] = []",
     'plans: list[RequestPlan] = self.__dict__.setdefault("plans", [])\n        if plans:\n            '
     "return plans"))
bug("OnePlanForBoth", "The backend beside it is itself, and it keeps one plan.",
    ("attention", "plans: list[RequestPlan] = []",
     'plans: list[RequestPlan] = self.__dict__.setdefault("plans", [])\n        plans.clear()'),
    ("attention", "    # --8<-- [start:attention-plan]", "    def beside(self):\n        return self\n"))
bug("IgnoresOut", "The output is always a new tensor.",
    ("attention", "attention_output(q, layer, out)", "attention_output(q, layer, None)"))
bug("ValuesOfTheNextHead", "A head sums the values of another.",
    ("attention", "return (weights @ v).transpose(0, 1)", "return (weights @ v.roll(1, 0)).transpose(0, 1)"))
