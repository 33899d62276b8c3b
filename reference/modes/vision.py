"""The vision tower: images to rows of the prompt, as in LLaVA, by CLIP's vision transformer and two
layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from diptych.reference.modes.qwen_vision import QwenVisionTower, normalized
from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.engine.requests.tower_rows import TowerRows
from diptych.shared.loading.safetensors_file import read_checkpoint

PREFIXES = ("model.", "visual.", "vision_tower.", "vision_model.")
"""Prefixes of a weight's name, removed in this order if present."""


class VisionLayer(nn.Module):
    """A layer of the vision transformer. Every patch attends to every patch of its image, without mask or
    cache."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.layer_norm1 = nn.LayerNorm(size, config.layer_norm_eps)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(size, size) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.layer_norm2 = nn.LayerNorm(size, config.layer_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "fc1": nn.Linear(size, config.intermediate_size),
                "fc2": nn.Linear(config.intermediate_size, size),
            }
        )

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


class VisionTower(nn.Module):
    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.known = TowerRows()
        size, patch = config.hidden_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.empty(size))
        self.patch_embedding = nn.Conv2d(3, size, patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding(config.num_patches + 1, size)
        self.pre_layrnorm = nn.LayerNorm(size, config.layer_norm_eps)  # as checkpoints spell it
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_layers))
        self.linear_1 = nn.Linear(size, text_hidden_size, config.projector_bias)
        self.linear_2 = nn.Linear(text_hidden_size, text_hidden_size, config.projector_bias)

    # --8<-- [start:vision-tower]
    @torch.inference_mode()
    def forward(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each uint8 [3, image_size, image_size] -> rows for layer 0 of the text model,
        [num_tokens, text_hidden_size]."""
        x = normalized(torch.stack(list(images)), self.config)
        x = self.patch_embedding(x.to(self.class_embedding)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        x = self.pre_layrnorm(x + self.position_embedding.weight)
        for layer in self.layers:
            x = layer(x)
        if not self.config.has_class_token:
            x = x[:, 1:]
        return self.linear_2(F.gelu(self.linear_1(x))).unbind()
        # --8<-- [end:vision-tower]


def load_vision(
    folder: Path, config: VisionConfig, text_hidden_size: int, device: torch.device, dtype: torch.dtype
) -> VisionTower | QwenVisionTower:
    """The tower of a checkpoint, and what is behind it. Raises `ValueError` for weights that are missing or
    of another shape. Layers after the used features are not read."""
    tower_class = VisionTower if config.dynamic is None else QwenVisionTower
    tower: VisionTower | QwenVisionTower = tower_class(config, text_hidden_size)
    wanted, found = tower.state_dict(), {}
    for name, info in read_checkpoint(folder).items():
        own = _own_name(name)
        if own not in wanted:
            continue
        if info.shape != wanted[own].shape:
            raise ValueError(f"{folder}: {name} is {list(info.shape)}, not {list(wanted[own].shape)}")
        with safe_open(info.path, framework="pt", device="cpu") as file:
            found[own] = file.get_tensor(name)
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights of the vision tower are missing: {missing[0]} ..."
        )
    tower.load_state_dict(found)
    return tower.to(device, dtype).eval().requires_grad_(False)


def _own_name(name: str) -> str | None:
    """The name in `VisionTower` of a checkpoint's weight; None: it is of another part."""
    is_vision = any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector."))
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    name = name.removeprefix("multi_modal_projector.").removeprefix("embeddings.").removeprefix("encoder.")
    return name if is_vision else None
