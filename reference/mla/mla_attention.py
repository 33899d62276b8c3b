"""Multi-head latent attention one request at a time, in both forms."""

from __future__ import annotations

from typing import cast

import torch

from diptych.reference.attention import RequestPlan, TorchAttention
from diptych.shared.interfaces.mla_attention import MLAAttentionBackend
from diptych.shared.modeling.forward import attention_output
from diptych.shared.modeling.mla import absorb, expand, project_values
from diptych.shared.types.attention import AttentionLayer, MLALayer


class ExpandedMLA(TorchAttention, MLAAttentionBackend):
    """The expanded form: gather the rows of a request, compute keys and values of every head from them, and
    attend."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, _ = super()._keys_and_values(layer, slots)
        return expand(rows.to(torch.promote_types(rows.dtype, torch.float32)), cast(MLALayer, layer))


class AbsorbedMLA(TorchAttention, MLAAttentionBackend):
    """The absorbed form: attention over the rows themselves, as the keys of one KV head, whose values are the
    first numbers of a row. Per cached token it reads kv_lora_rank + qk_rope_head_dim numbers once for all
    heads."""

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: list[RequestPlan],
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mla = cast(MLALayer, layer)
        output = attention_output(q, layer, out)
        q_latent = absorb(q.to(torch.promote_types(q.dtype, torch.float32)), mla)
        latent = super().run(q_latent, mla.absorbed, plan)
        return output.copy_(project_values(latent, mla))
