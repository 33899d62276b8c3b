"""The reference's models, beyond the contract that `tests/conformance` holds every panel to."""

import subprocess
import sys

import pytest
import torch
from model_harness import build_model

from diptych.reference.models import CLASSES, model_class
from diptych.shared.config import parse_config
from diptych.shared.config.families import FAMILIES
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.loading.weights import named_targets
from diptych.shared.tools.conformance.oracles.configs import CONFIGS


def test_every_architecture_that_configs_know_has_a_model() -> None:
    assert {family.decoder for family in FAMILIES.values()} == set(CLASSES)
    for architecture in FAMILIES:
        assert issubclass(model_class(architecture), CausalLM)


def test_a_family_is_imported_only_when_chosen() -> None:
    script = """
import sys
from diptych.reference.models import model_class
assert not any(name.startswith("diptych.reference.models.") for name in sys.modules)
model_class("MistralForCausalLM")
assert "diptych.reference.decoder" in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_wants_exactly_the_expected_weights(name: str) -> None:
    config = parse_config(CONFIGS[name])
    with torch.device("meta"):
        targets = named_targets(build_model(config))
    assert {name: tuple(tensor.shape) for name, tensor in targets.items()} == expected_shapes(config)
