"""The vision tower: images to rows of the prompt, as in LLaVA, by CLIP's vision transformer and two
layers."""

from __future__ import annotations

import torch

from diptych.reference.modes.qwen_vision import QwenVisionTower
from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.interfaces import vision as interface
from diptych.shared.modeling.vision_modules import ClipLayerModules, ClipTowerModules


class VisionLayer(ClipLayerModules):
    """A layer of the vision transformer. Every patch attends to every patch of its image, without mask or
    cache."""

    # --8<-- [start:vision-layer]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[images, tokens, hidden_size] -> the same shape."""
        normed, attn = self.layer_norm1(x), self.self_attn
        q, k, v = (
            attn[name](normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        output = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        x = x + attn["out_proj"](output.transpose(1, 2).flatten(2))
        y = self.mlp["fc1"](self.layer_norm2(x))
        return x + self.mlp["fc2"](y * torch.sigmoid(1.702 * y))  # CLIP's GELU
        # --8<-- [end:vision-layer]


class VisionTower(ClipTowerModules):
    layer_class = VisionLayer


def tower_class(config: VisionConfig) -> type[interface.VisionTower]:
    return VisionTower if config.dynamic is None else QwenVisionTower
