"""Batches of multi-head latent attention over poisoned pools, and its expanded form in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from diptych.shared import registry
from diptych.shared.interfaces import TokenToKVPool
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, Inputs
from diptych.shared.tools.conformance.oracles.attention_batches import (
    LAYER_ID,
    NUM_LAYERS,
    AttentionBatch,
    AttentionCase,
)
from diptych.shared.types.attention import AttentionLayer, KVScales, MLALayer

PLAIN_SIZES = 512, 64
"""kv_lora_rank and qk_rope_head_dim of every published model of these families."""


@dataclass(frozen=True)
class MLACase(AttentionCase):
    """An attention case for latent rows: num_kv_heads, head_dim, windows, caps and sinks do not apply."""

    num_qo_heads: int = 4
    num_kv_heads: int = 1
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 48

    @property
    def unusual(self) -> list[str]:
        found = {
            "dtype": self.dtype not in HALF_TYPES,
            "kv_lora_rank": self.kv_lora_rank != PLAIN_SIZES[0],
            "qk_rope_head_dim": self.qk_rope_head_dim != PLAIN_SIZES[1],
            "num_qo_heads": self.num_qo_heads > 128,
            "custom_mask": self.mask != "causal",
            "tree_mask": self.tail is not None,
            "kv_cache_dtype": self.kv_scales is not None,
        }
        return [name for name, is_unusual in found.items() if is_unusual]

    def make(self) -> AttentionBatch:
        return MLABatch(self)


class MLABatch(AttentionBatch):
    case: MLACase

    def __init__(self, case: MLACase) -> None:
        super().__init__(case)
        head_dim = case.qk_nope_head_dim + case.qk_rope_head_dim
        inputs = Inputs(case.seed + 1)
        self.q = inputs.normal(self.q.shape[0], case.num_qo_heads, head_dim, dtype=case.dtype)

    def _kv_pool(self, pools: Any, size: int) -> TokenToKVPool:
        case = self.case
        dtype, scales = case.dtype, None
        if case.kv_scales is not None:  # the scales of the other layer would change every result
            dtype, scales = (
                case.kv_dtype,
                [KVScales(3 * case.kv_scales.k, 3 * case.kv_scales.k), case.kv_scales],
            )
        pool: TokenToKVPool = registry.load("mla_memory_pool", "reference")(
            size, case.page_size, NUM_LAYERS, case.kv_lora_rank, case.qk_rope_head_dim, dtype,
            check_device(), scales,
        )  # fmt: skip
        return pool

    def store_kv(self, layer_id: int, inputs: Inputs) -> None:
        row_size = self.case.kv_lora_rank + self.case.qk_rope_head_dim
        for slots in self.slots:
            rows = inputs.normal(len(slots), 1, row_size, dtype=self.case.dtype)
            self.kv_pool.store(layer_id, slots, rows, rows[..., : self.case.kv_lora_rank])

    def _layer(self, inputs: Inputs) -> AttentionLayer:
        case = self.case
        num_out = case.num_qo_heads * (case.qk_nope_head_dim + case.v_head_dim)
        kv_b_proj = nn.Linear(case.kv_lora_rank, num_out, bias=False, device="meta")
        weight = inputs.normal(num_out, case.kv_lora_rank) * case.kv_lora_rank**-0.5
        kv_b_proj.weight = nn.Parameter(weight.to(case.dtype), requires_grad=False)
        head_dim = case.qk_nope_head_dim + case.qk_rope_head_dim
        return MLALayer(
            LAYER_ID,
            case.num_qo_heads,
            case.num_qo_heads,
            head_dim,
            scale=case.scale * head_dim**-0.5,
            v_head_dim=case.v_head_dim,
            kv_lora_rank=case.kv_lora_rank,
            qk_nope_head_dim=case.qk_nope_head_dim,
            kv_b_proj=kv_b_proj,
        )

    def expected(self) -> torch.Tensor:
        """Dense attention over the expanded keys and values of every head, one request and one head at a
        time."""
        layer, start = cast(MLALayer, self.layer), 0
        rows = self.kv_pool.k_buffer(layer.layer_id)[:, 0].cpu().double()
        if self.case.kv_scales is not None:
            rows = rows * self.case.kv_scales.k
        q, output = self.q.cpu().double(), self.output_like().cpu().double()
        for slots, (cached, new), mask in zip(self.slots, self.case.requests, self.masks):
            live = rows[slots.cpu()]
            c, k_rope = live[:, : layer.kv_lora_rank], live[:, layer.kv_lora_rank :]
            positions = torch.arange(cached + new)
            sees = positions[None] <= positions[cached:, None] if mask is None else mask
            for h in range(layer.num_qo_heads):
                w_k, w_v = (w[h].cpu().double() for w in (layer.w_k, layer.w_v))
                keys = torch.cat([c @ w_k.T, k_rope], dim=1)
                scores = layer.scale * (q[start : start + new, h] @ keys.T)
                weights = torch.softmax(scores.masked_fill(~sees, -torch.inf), dim=1)
                weights = torch.where(sees.any(1, keepdim=True), weights, 0.0)
                output[start : start + new, h] = weights @ (c @ w_v.T)
            start += new
        return output
