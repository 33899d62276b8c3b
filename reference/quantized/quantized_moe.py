"""Quantized experts: a loop over experts, which are dequantized one at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diptych.reference.layers import SiluAndMul
from diptych.shared.interfaces.moe import TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts as Interface
from diptych.shared.modeling.dequantized_values import dequantize, dequantized_input
from diptych.shared.modeling.moe_modules import ClampedSwiGLU


class QuantizedExperts(Interface):
    # --8<-- [start:run-quantized-experts]
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        act_fn = ClampedSwiGLU(self.swiglu_limit) if self.swiglu_limit > 0 else SiluAndMul()
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert_id in topk.topk_ids.unique().tolist():
            if expert_id < 0:
                continue  # padding tokens
            token_rows, slots = (topk.topk_ids == expert_id).nonzero(as_tuple=True)
            gate, up = self._linear(x[token_rows], "w13", self.b13, expert_id).chunk(2, dim=-1)
            hidden = self._linear(act_fn(gate, up).to(x.dtype), "w2", self.b2, expert_id)
            y.index_add_(0, token_rows, hidden * topk.topk_weights[token_rows, slots, None])
        return y.to(x.dtype)

    def _linear(self, x: torch.Tensor, name: str, bias: torch.Tensor | None, expert_id: int) -> torch.Tensor:
        """float32 [num_tokens, out] of one expert's w13 or w2."""
        parts = *self.tensors_of(name), self.input_scales(name)
        values: Any = (None if part is None else part[expert_id] for part in parts)
        weight, scale, zero, static = values
        weight = dequantize(weight, scale, zero, self.scheme)
        x = dequantized_input(x, self.scheme, static, self.tp if name == "w2" else None)
        y = F.linear(x, weight)
        return y if bias is None else y + bias[expert_id]
        # --8<-- [end:run-quantized-experts]
