"""Weights of vision towers, under the names of checkpoints; and where the patches of an image are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.interfaces.vision import VisionTower
from diptych.shared.to_device import copy_to_device, to_device


class ClipLayerModules(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.layer_norm1 = nn.LayerNorm(size, config.layer_norm_eps)
        self.self_attn = self.make_projections(size)
        self.layer_norm2 = nn.LayerNorm(size, config.layer_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "fc1": nn.Linear(size, config.intermediate_size),
                "fc2": nn.Linear(config.intermediate_size, size),
            }
        )

    def make_projections(self, size: int) -> nn.ModuleDict:
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        return nn.ModuleDict({name: nn.Linear(size, size) for name in names})


class ClipTowerModules(VisionTower):
    """CLIP's vision transformer, and LLaVA's projector."""

    layer_class: type[nn.Module]

    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__(config, text_hidden_size)
        size, patch = config.hidden_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.empty(size))
        self.patch_embedding = nn.Conv2d(3, size, patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding(config.num_patches + 1, size)
        self.pre_layrnorm = nn.LayerNorm(size, config.layer_norm_eps)  # as checkpoints spell it
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_layers))
        self.linear_1 = nn.Linear(size, text_hidden_size, config.projector_bias)
        self.linear_2 = nn.Linear(text_hidden_size, text_hidden_size, config.projector_bias)

    # --8<-- [start:vision-tower]
    @torch.inference_mode()
    def forward(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        x = copy_to_device(torch.stack(list(images)), self.class_embedding.device)
        x = normalized(x, self.config).to(self.class_embedding.dtype)
        x = self.patch_embedding(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        x = self.pre_layrnorm(x + self.position_embedding.weight)
        for layer in self.layers:
            x = layer(x)
        if not self.config.has_class_token:
            x = x[:, 1:]
        return self.linear_2(F.gelu(self.linear_1(x))).unbind()
        # --8<-- [end:vision-tower]


class QwenLayerModules(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(size, config.layer_norm_eps)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.norm2 = nn.LayerNorm(size, config.layer_norm_eps)
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(size, inner), "linear_fc2": nn.Linear(inner, size)})


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


class QwenTowerModules(VisionTower):
    """The tower of Qwen3-VL."""

    layer_class: type[nn.Module]

    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__(config, text_hidden_size)
        assert config.dynamic is not None
        self.dynamic = config.dynamic
        size, frames, patch = config.hidden_size, self.dynamic.temporal_patch_size, config.patch_size
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, size, (frames, patch, patch))})
        self.pos_embed = nn.Embedding(self.dynamic.grid_size**2, size)
        self.blocks = nn.ModuleList(self.layer_class(config) for _ in range(config.num_layers))
        self.merger = Merger(config, text_hidden_size, merges_first=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, text_hidden_size, merges_first=True) for _ in self.dynamic.deepstack_layers
        )
        self.mergers: dict[int, Any] = dict(zip(self.dynamic.deepstack_layers, self.deepstack_merger_list))

    def embedded(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normed pixels [3, height, width] -> [patches, hidden_size], with what says where each patch is."""
        weight, bias = self.patch_embed["proj"].parameters()
        x = F.linear(self.patches(pixels).to(weight), weight.flatten(1), bias)
        return x + self._position_embedding(*self._grid(pixels)).to(x.dtype)

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """[3, height, width] -> [patches, 3 * frames * pixels of a patch]. A still image is a
        video whose frames are equal."""
        patch, frames = self.config.patch_size, self.dynamic.temporal_patch_size
        patches = pixels.unflatten(2, (-1, patch)).unflatten(1, (-1, patch)).permute(1, 3, 0, 2, 4)
        patches = self._by_squares(patches)[:, :, None].expand(-1, -1, frames, -1, -1)
        return patches.flatten(1)

    def angles(self, image: torch.Tensor) -> torch.Tensor:
        """Half of the frequencies turn by a patch's row, half by its column: float32 [patches, half a
        head]."""
        device, dim = self.pos_embed.weight.device, self.config.hidden_size // self.config.num_heads // 2
        inv_freq = self.dynamic.rope_theta ** -(torch.arange(0, dim, 2, device=device) / dim)
        sides = [torch.arange(side, dtype=torch.float32, device=device) for side in self._grid(image)]
        places = self._by_squares(torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1))
        return (places[..., None] * inv_freq).flatten(1)

    def _grid(self, image: torch.Tensor) -> tuple[int, int]:
        return image.shape[1] // self.config.patch_size, image.shape[2] // self.config.patch_size

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


def normalized(pixels: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """uint8 [..., 3, height, width] -> float32, by the mean and std of each colour."""
    colours = to_device([config.image_mean, config.image_std], torch.float32, pixels.device)
    mean, std = colours[:, :, None, None]
    return (pixels / 255 - mean) / std
