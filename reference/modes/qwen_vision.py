"""The vision tower of Qwen3-VL: images of any size, and rows for several layers of the text model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.engine.requests.tower_rows import TowerRows


class QwenVisionLayer(nn.Module):
    """A layer of the vision transformer. Every patch attends to every patch of its image, without mask or
    cache."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(size, config.layer_norm_eps)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.norm2 = nn.LayerNorm(size, config.layer_norm_eps)
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(size, inner), "linear_fc2": nn.Linear(inner, size)})

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


class Merger(nn.Module):
    """Two layers that make a row of the prompt from a square of patches. merges_first: the norm is over the
    whole square."""

    def __init__(self, config: VisionConfig, text_hidden_size: int, merges_first: bool) -> None:
        super().__init__()
        assert config.dynamic is not None
        self.size = config.hidden_size * config.dynamic.merge_size**2
        self.norm = nn.LayerNorm(self.size if merges_first else config.hidden_size, config.layer_norm_eps)
        self.linear_fc1 = nn.Linear(self.size, self.size)
        self.linear_fc2 = nn.Linear(self.size, text_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, hidden_size], square by square -> [rows, text_hidden_size]."""
        x = self.norm(x.view(-1, *self.norm.normalized_shape)).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class QwenVisionTower(nn.Module):
    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        assert config.dynamic is not None
        self.config, self.dynamic = config, config.dynamic
        self.known = TowerRows()
        size, frames, patch = config.hidden_size, self.dynamic.temporal_patch_size, config.patch_size
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, size, (frames, patch, patch))})
        self.pos_embed = nn.Embedding(self.dynamic.grid_size**2, size)
        self.blocks = nn.ModuleList(QwenVisionLayer(config) for _ in range(config.num_layers))
        self.merger = Merger(config, text_hidden_size, merges_first=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, text_hidden_size, merges_first=True) for _ in self.dynamic.deepstack_layers
        )

    @torch.inference_mode()
    def forward(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each uint8 [3, height, width] -> rows for layer 0 of the text model, and beside them those that are
        added behind its first layers, [rows, k * text_hidden_size]."""
        return [self._rows_of(image) for image in images]

    # --8<-- [start:qwen-vision-tower]
    def _rows_of(self, image: torch.Tensor) -> torch.Tensor:
        weight, bias = self.patch_embed["proj"].parameters()
        patches = self._patches(normalized(image, self.config)).to(weight)
        x = F.linear(patches, weight.flatten(1), bias)
        height, width = (side // self.config.patch_size for side in image.shape[1:])
        x = x + self._position_embedding(height, width).to(x.dtype)
        angles, found = self._angles(height, width), []
        mergers = dict(zip(self.dynamic.deepstack_layers, self.deepstack_merger_list))
        for layer_id, layer in enumerate(self.blocks):
            x = layer(x, angles)
            if layer_id in mergers:
                found.append(mergers[layer_id](x))
        return torch.cat([self.merger(x), *found], dim=1)
        # --8<-- [end:qwen-vision-tower]

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """[3, height, width] -> [patches, 3 * frames * pixels of a patch]. A still image is a
        video whose frames are equal."""
        patch, frames = self.config.patch_size, self.dynamic.temporal_patch_size
        patches = pixels.unflatten(2, (-1, patch)).unflatten(1, (-1, patch)).permute(1, 3, 0, 2, 4)
        patches = self._by_squares(patches)[:, :, None].expand(-1, -1, frames, -1, -1)
        return patches.flatten(1)

    def _by_squares(self, grid: torch.Tensor) -> torch.Tensor:
        """[height, width, ...] of patches -> [patches, ...], with the patches of a row of the
        prompt one behind the other."""
        merge = self.dynamic.merge_size
        return grid.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten(0, 3)

    def _position_embedding(self, height: int, width: int) -> torch.Tensor:
        """The grid of learned embeddings, stretched over the image: float32 [patches, size]."""
        side = self.dynamic.grid_size
        grid = self.pos_embed.weight.float().T.unflatten(1, (side, side))[None]
        grid = F.interpolate(grid, (height, width), mode="bilinear", align_corners=True)
        return self._by_squares(grid[0].permute(1, 2, 0))

    def _angles(self, height: int, width: int) -> torch.Tensor:
        """Half of the frequencies turn by a patch's row, half by its column."""
        device, dim = self.pos_embed.weight.device, self.config.hidden_size // self.config.num_heads // 2
        inv_freq = self.dynamic.rope_theta ** -(torch.arange(0, dim, 2, device=device) / dim)
        sides = [torch.arange(side, dtype=torch.float32, device=device) for side in (height, width)]
        places = self._by_squares(torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1))
        return (places[..., None] * inv_freq).flatten(1)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [heads, patches, head_dim], whose halves turn together, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def normalized(pixels: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """uint8 [..., 3, height, width] -> float32 on the CPU, by the mean and std of each colour."""
    mean, std = torch.tensor([config.image_mean, config.image_std], device="cpu")[:, :, None, None]
    return (pixels.cpu() / 255 - mean) / std
