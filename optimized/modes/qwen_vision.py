"""The vision tower of Qwen3-VL: images of any size, and rows for several layers of the text model.

Differs from reference: images of a call run as one sequence of patches, up to a number of pixels; pixels are
normed on the device. A kernel rotates q and k from a table of angles. In 16 bits one kernel of attention
takes all images. The CPU waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from diptych.optimized.kernels.attention.qk_norm_rope_store import rotate
from diptych.optimized.kernels.linear.cublas_linear import HALF_TYPES
from diptych.shared.modeling.vision_modules import QwenLayerModules, QwenTowerModules, normalized
from diptych.shared.to_device import copy_to_device, vectors_to_device


class PackedAngles(NamedTuple):
    """The patches of several images, one image behind the other."""

    cos_sin: torch.Tensor  # float32 [patches, head_dim]
    numbers: torch.Tensor  # int64: those of the patches
    lens: list[int]  # patches of each image
    starts: torch.Tensor  # int32 [images + 1]


MAX_PIXELS = 8 * 2**20
"""Of one pass, beyond its first image: of patches of 16 x 16, activations take 0.7 GB."""


class QwenVisionLayer(QwenLayerModules):
    """A layer of the vision transformer. Every patch attends to every patch of its image, without mask or
    cache."""

    def forward(self, x: torch.Tensor, angles: PackedAngles) -> torch.Tensor:
        """x [patches, hidden_size] -> x's shape."""
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3 * self.num_heads, -1))
        qk, v = qkv.tensor_split([2 * self.num_heads], dim=1)
        q, k = rotate(qk, angles.numbers, angles.cos_sin).chunk(2, dim=1)
        x = x + self.attn["proj"](attended(q, k, v, angles).flatten(1))
        y = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](y)


class QwenVisionTower(QwenTowerModules):
    layer_class = QwenVisionLayer

    # --8<-- [start:qwen-vision-tower]
    @torch.inference_mode()
    def forward(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [rows for some in passes(images) for rows in self._rows_of(some)]

    def _rows_of(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        pixels = [copy_to_device(image, self.pos_embed.weight.device) for image in images]
        embedded = [self.embedded(normalized(each, self.config)) for each in pixels]
        angles = self._packed(pixels, [len(each) for each in embedded])
        x, found = torch.cat(embedded), []
        for layer_id, layer in enumerate(self.blocks):
            x = layer(x, angles)
            if layer_id in self.mergers:
                found.append(self.mergers[layer_id](x))
        rows = torch.cat([self.merger(x), *found], dim=1)
        return rows.split([num // self.dynamic.merge_size**2 for num in angles.lens])
        # --8<-- [end:qwen-vision-tower]

    def _packed(self, pixels: Sequence[torch.Tensor], lens: list[int]) -> PackedAngles:
        angles = torch.cat([self.angles(each) for each in pixels])
        (starts,) = vectors_to_device([[0, *accumulate(lens)]], angles.device)
        numbers = torch.arange(len(angles), device=angles.device)
        return PackedAngles(torch.cat((angles.cos(), angles.sin()), 1), numbers, lens, starts.int())


def passes(images: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The images of each pass."""
    some: list[torch.Tensor] = []
    for image in images:
        if some and sum(each[0].numel() for each in (*some, image)) > MAX_PIXELS:
            yield some
            some = []
        some.append(image)
    yield some


@cache
def is_recent(device: torch.device) -> bool:
    """Whether FlashAttention has kernels for the GPU."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: PackedAngles) -> torch.Tensor:
    """q, k, v [patches, heads, head_dim] -> q's shape."""
    if q.is_cuda and q.dtype in HALF_TYPES and q.shape[-1] % 8 == 0 and is_recent(q.device):
        starts, longest = angles.starts, max(angles.lens)
        output = varlen_attn(q, k, v, starts, starts, longest, longest)
        assert isinstance(output, torch.Tensor)
        return output
    images = zip(*(each.transpose(0, 1)[None].split(angles.lens, dim=2) for each in (q, k, v)))
    return torch.cat([F.scaled_dot_product_attention(*each) for each in images], dim=2)[0].transpose(0, 1)
