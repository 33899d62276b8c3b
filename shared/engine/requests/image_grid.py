"""Images of any size, as in Qwen3-VL: the size that one is resized to, and positions of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diptych.shared.config.vision_config import VisionConfig


# --8<-- [start:dynamic-size]
def dynamic_size(size: tuple[int, int], config: VisionConfig) -> tuple[int, ...]:
    """Sides of about the same ratio: multiples of image_size, with a number of pixels
    from min_pixels to max_pixels."""
    dynamic, unit = config.dynamic, config.image_size
    assert dynamic is not None
    sides = tuple(round(side / unit) * unit for side in size)
    if math.prod(sides) > dynamic.max_pixels:
        shrink = math.sqrt(math.prod(size) / dynamic.max_pixels) * unit
        sides = tuple(max(math.floor(side / shrink), 1) * unit for side in size)
    elif math.prod(sides) < dynamic.min_pixels:
        grow = math.sqrt(dynamic.min_pixels / math.prod(size)) / unit
        sides = tuple(math.ceil(side * grow) * unit for side in size)
    return sides
    # --8<-- [end:dynamic-size]


def rope_positions(rows: Sequence[int], grids: Sequence[tuple[int, int]], prompt_len: int) -> torch.Tensor:
    """int64 [3, prompt_len]: the position of each token in time, by rows and by columns. rows: the places of
    the rows of images in the prompt, image by image; grids: rows and columns of each image."""
    # --8<-- [start:rope-positions]
    parts, place, start, num_seen = [], 0, 0, 0
    for height, width in grids:
        num_text, num = rows[num_seen] - place, height * width
        parts.append(torch.arange(start, start + num_text).expand(3, -1))
        start, row = start + num_text, torch.arange(num) // width
        by_axis = [torch.zeros_like(row), row, torch.arange(num) % width]
        parts.append(torch.stack(by_axis) + start)
        start += max(height, width)
        place, num_seen = rows[num_seen] + num, num_seen + num
    parts.append(torch.arange(start, start + prompt_len - place).expand(3, -1))
    return torch.cat(parts, dim=1)
    # --8<-- [end:rope-positions]
