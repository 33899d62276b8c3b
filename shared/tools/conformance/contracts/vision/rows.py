"""Clauses of vision towers: rows of images of one size and of several."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.config.vision_config import DynamicResolution, VisionConfig
from diptych.shared.interfaces.vision import VisionTower
from diptych.shared.loading.weights import named_targets
from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import agreement
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_form
from diptych.shared.tools.conformance.clauses.device import building
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance

Towers = Any
"""A module (or namespace) with `tower_class(config)`."""
TEXT_HIDDEN_SIZE, TYPES = 40, (torch.float32, torch.bfloat16)


def config_of(form: str) -> VisionConfig:
    dynamic = None
    if form.startswith("any size"):
        layers = (0, 2) if form.endswith("deepstack") else ()
        dynamic = DynamicResolution(0, 10_000, 2, 2, 5, 100.0, layers, video_token_id=2)
    return VisionConfig(
        image_token_id=1, image_size=8 if dynamic else 12, patch_size=4, hidden_size=48,
        intermediate_size=56, num_layers=3, num_heads=2, layer_norm_eps=1e-5,
        has_class_token=form == "class token", projector_bias=form != "class token", resize_to=12,
        dynamic=dynamic,
    )  # fmt: skip


def images_of(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    inputs = Inputs(1)
    return [inputs.integers(256, 3, *size).to("cpu", torch.uint8) for size in sizes]


def make_tower(impl: Towers, config: VisionConfig, dtype: torch.dtype) -> VisionTower:
    with building(dtype):
        tower: VisionTower = impl.tower_class(config)(config, TEXT_HIDDEN_SIZE).requires_grad_(False)
    inputs = Inputs(0)
    for name, target in sorted(named_targets(tower).items()):
        values = inputs.normal(*target.shape)
        is_norm = target.dim() == 1 and "norm" in name and name.endswith("weight")
        scale = 1.5 * target[0].numel() ** -0.5 if target.dim() > 1 and "embedding" not in name else 0.3
        target.copy_((is_norm + scale * values).to(torch.bfloat16))
    return tower


def expect_rows(impl: Towers, reference: Towers, case: Case, form: str, images: list[torch.Tensor]) -> None:
    config, close = config_of(form), tolerance("logits", case.dtype)
    found = make_tower(impl, config, case.dtype)(images)
    expected = make_tower(reference, config, torch.float64)(images)
    for i, (rows, theirs) in enumerate(zip(found, expected, strict=True)):
        expect_form(f"rows of image {i}", rows, like=theirs, dtype=case.dtype)
        expect_close(f"rows of image {i}", rows, theirs, close)


@agreement(
    "Rows of images of one size are those of the reference in float64.",
    grid("{form}, {dtype}", form=("patches", "class token"), dtype=TYPES),
)
def rows_of_one_size(impl: Towers, case: Case, reference: Towers) -> None:
    expect_rows(impl, reference, case, case.form, images_of((12, 12), (12, 12)))


@agreement("So are those of an image of any size.", grid("{dtype}", dtype=TYPES))
def rows_of_any_size(impl: Towers, case: Case, reference: Towers) -> None:
    expect_rows(impl, reference, case, "any size", images_of((16, 24)))


@agreement(
    "Of several images of a call each has the rows that it has alone; with deepstack in the order of layers.",
    grid("{dtype}", dtype=TYPES),
)
def rows_of_several(impl: Towers, case: Case, reference: Towers) -> None:
    images = images_of((16, 24), (24, 16), (8, 40), (16, 24))
    expect_rows(impl, reference, case, "any size, deepstack", images)
