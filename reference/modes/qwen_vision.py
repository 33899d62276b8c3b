"""The vision tower of Qwen3-VL: images of any size, and rows for several layers of the text model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from diptych.shared.modeling.vision_modules import QwenLayerModules, QwenTowerModules, normalized


class QwenVisionLayer(QwenLayerModules):
    """A layer of the vision transformer. Every patch attends to every patch of its image, without mask or
    cache."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden_size], angles float32 [patches, half a head] -> x's shape."""
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3)
        q, k = rotated(q, angles), rotated(k, angles)
        # Of tensors with 3 dimensions torch would hold the scores of all pairs of patches.
        output = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.attn["proj"](output.transpose(0, 1).flatten(1))
        y = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](y)


class QwenVisionTower(QwenTowerModules):
    layer_class = QwenVisionLayer

    @torch.inference_mode()
    def forward(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [self._rows_of(image) for image in images]

    # --8<-- [start:qwen-vision-tower]
    def _rows_of(self, image: torch.Tensor) -> torch.Tensor:
        x = self.embedded(normalized(image, self.config))
        angles, found = self.angles(image), []
        for layer_id, layer in enumerate(self.blocks):
            x = layer(x, angles)
            if layer_id in self.mergers:
                found.append(self.mergers[layer_id](x))
        return torch.cat([self.merger(x), *found], dim=1)
        # --8<-- [end:qwen-vision-tower]


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [heads, patches, head_dim], whose halves turn together, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
