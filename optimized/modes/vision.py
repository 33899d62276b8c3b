"""The vision tower: images to rows of the prompt, as in LLaVA, by CLIP's vision transformer and two
layers.

Differs from reference: q, k and v are one GEMM, and attention is one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diptych.optimized.kernels.linear import cublas_linear
from diptych.optimized.layers import MergedLinear
from diptych.optimized.modes.qwen_vision import QwenVisionTower
from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.interfaces import vision as interface
from diptych.shared.modeling.vision_modules import ClipLayerModules, ClipTowerModules


class VisionLayer(ClipLayerModules):
    """A layer of the vision transformer. Every patch attends to every patch of its image, without mask or
    cache."""

    def make_projections(self, size: int) -> nn.ModuleDict:
        qkv = MergedLinear(size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), bias=True)
        return nn.ModuleDict({"qkv": qkv, "out_proj": nn.Linear(size, size)})

    # --8<-- [start:vision-layer]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[images, tokens, hidden_size] -> the same shape."""
        qkv: Any = self.self_attn["qkv"]
        heads = cublas_linear.linear(self.layer_norm1(x), qkv.weight, qkv.bias)
        q, k, v = heads.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(q, k, v)
        x = x + self.self_attn["out_proj"](output.transpose(1, 2).flatten(2))
        y = self.mlp["fc1"](self.layer_norm2(x))
        return x + self.mlp["fc2"](y * torch.sigmoid(1.702 * y))  # CLIP's GELU
        # --8<-- [end:vision-layer]


class VisionTower(ClipTowerModules):
    layer_class = VisionLayer


def tower_class(config: VisionConfig) -> type[interface.VisionTower]:
    return VisionTower if config.dynamic is None else QwenVisionTower
