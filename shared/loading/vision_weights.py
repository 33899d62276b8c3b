"""A vision tower on its device, with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.interfaces.vision import VisionTower
from diptych.shared.loading.load_model import building
from diptych.shared.loading.safetensors_file import ALL_DTYPES, SUPPORTED_DTYPES, read_checkpoint
from diptych.shared.loading.weights import named_targets

PREFIXES = ("model.", "visual.", "vision_tower.", "vision_model.")
"""Prefixes of a weight's name, removed in this order if present."""


def load_vision(
    towers: Any,
    folder: Path,
    config: VisionConfig,
    text_hidden_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> VisionTower | None:
    """The tower of a checkpoint, and what is behind it; None: there is none. towers: the component. Raises
    `ValueError` for weights that are missing or of another shape. Layers after the used features are not
    read."""
    with building(dtype, device):
        tower: VisionTower = towers.tower_class(config)(config, text_hidden_size)
    tower.requires_grad_(False)
    targets = named_targets(tower)
    missing = set(targets)
    for name, info in read_checkpoint(folder, ALL_DTYPES).items():
        own = _own_name(name)
        if own not in targets:
            continue
        if info.shape != targets[own].shape:
            raise ValueError(f"{folder}: {name} is {list(info.shape)}, not {list(targets[own].shape)}")
        if info.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"{folder}: {name} is {info.dtype}; a tower has one of {SUPPORTED_DTYPES}")
        with safe_open(info.path, framework="pt", device="cpu") as file:
            targets[own].copy_(file.get_tensor(name))
        missing.discard(own)
    if missing and len(missing) == len(targets):
        return None
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights of the vision tower are missing: {min(missing)} ..."
        )
    return tower.eval()


def _own_name(name: str) -> str:
    """The name in a tower of a checkpoint's weight; "": it is of another part."""
    is_vision = any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector."))
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    name = name.removeprefix("multi_modal_projector.").removeprefix("embeddings.").removeprefix("encoder.")
    return name if is_vision else ""
