"""The built-in EAGLE-3 head is what its card says: in the public format, trained, and accepted that often."""

import json
from pathlib import Path

import pytest
import torch

from diptych.shared.config import read_config, read_draft_config
from diptych.shared.loading.draft_weights import draft_shapes, iterate_draft_weights
from diptych.shared.loading.model_path import ASSETS, builtin_models
from diptych.shared.tools.training.acceptance import measure_acceptance, save_card
from diptych.shared.tools.training.train_eagle3 import TARGET, TARGET_LAYERS
from diptych.shared.types import DraftShape

FOLDER = ASSETS / "tiny-dense-eagle3"
SHAPE = DraftShape(5, 4, 16)


def record() -> dict:
    return json.loads((FOLDER / "training.json").read_text())


def test_it_is_in_the_public_format() -> None:
    config = read_draft_config(FOLDER, read_config(TARGET))
    assert (config.draft_format, config.target_layers) == ("eagle3", TARGET_LAYERS)
    weights = dict(iterate_draft_weights(FOLDER))
    expected = {**draft_shapes(config), "lm_head.weight": (1920, 256), "d2t": (1920,), "t2d": (1920,)}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
    floats = [tensor for tensor in weights.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in floats) == record()["num_parameters"]


def test_it_is_no_model_of_its_own() -> None:
    assert builtin_models() == ["tiny-dense", "tiny-moe"]


def test_card_and_record_agree(tmp_path: Path) -> None:
    for name in ("training.json", "config.json"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    save_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()
    assert "--out shared/assets/tiny-dense-eagle3" in record()["command"]


def test_later_steps_are_guessed_nearly_as_well_as_the_first() -> None:
    """What training-time test is for: without it the second step, the first from own states, falls apart."""
    top1 = [step["top1"] for step in record()["held_out"]["steps"]]
    assert len(top1) == 5
    assert min(top1[1:4]) > 0.8 * top1[0]


@pytest.mark.full
def test_it_is_accepted_as_often_as_the_record_says() -> None:
    recorded = record()["acceptance"]["5/4/16"]
    assert recorded["with_bonus"] >= 3.0
    stats = measure_acceptance(str(FOLDER), SHAPE, 20, panel="reference", device="cpu")
    # Twenty questions, one of each kind, against the record's more: their answers are of other lengths.
    assert stats.acceptance_length_with_bonus >= 3.0
