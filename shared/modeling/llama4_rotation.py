"""The rotation of Llama-4's heads: RoPE in most layers, and a temperature in the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diptych.shared.config import ModelConfig
from diptych.shared.modeling.decoder_modules import AttentionModules
from diptych.shared.modeling.forward import temperature


class Llama4Rotation(AttentionModules):
    """Layers with RoPE norm the heads of q and k afterwards, without a weight. Layers without RoPE scale q by
    a temperature that grows with the position. Stands before the class of a panel's attention."""

    def __init__(self, config: ModelConfig, layer_id: int, *more: Any) -> None:
        super().__init__(config, layer_id, *more)
        self.has_l2_norm = config.qk_l2_norm
        self.eps = config.rms_norm_eps
        self.temperature = config.attn_temperature

    # --8<-- [start:rope-or-temperature]
    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
            if self.has_l2_norm:
                q, k = (F.rms_norm(x, x.shape[-1:], eps=self.eps) for x in (q, k))
        elif self.temperature is not None:
            q = (q * temperature(self.temperature, positions)[:, None, None]).to(q.dtype)
        return q, k
        # --8<-- [end:rope-or-temperature]
