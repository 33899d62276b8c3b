"""Contract of a vision tower: images to rows of the prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from diptych.shared.config.vision_config import VisionConfig


class VisionTower(nn.Module, ABC):
    """A vision transformer, and what projects its features to the size of the text model. Built on any device
    and in any type; usable once its weights are loaded (`diptych.shared.loading.vision_weights`). Rows of an
    image depend on this image alone."""

    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.known: Any = None  # rows of earlier images: a `TowerRows`, from the engine

    @abstractmethod
    def forward(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each uint8 [3, height, width] on the CPU, of a size that `config` allows -> rows for layer 0 of the
        text model, [rows, text_hidden_size]; and, with deepstack, beside them those that are added to the
        inputs of its layers 1 to k - 1: [rows, k * text_hidden_size]. On the tower's device, which is not
        waited for."""
