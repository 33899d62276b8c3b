"""Models of the tests of several ranks."""

from __future__ import annotations

import json

import pytest

from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from tests.parallel.tiny_ranks import EAGLE, LLAMA, QWEN3_MOE

MODELS = {
    "llama": LLAMA,
    "qwen3-moe": QWEN3_MOE,
    "eagle-draft": EAGLE,
    "deepseek-v2-lite": CONFIGS["deepseek-v2-lite"],
    "latent rows": CONFIGS["deepseek-v2-lite"] | {"num_attention_heads": 4, "num_key_value_heads": 4},
}


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json alone: the weights are random."""
    found = {}
    for name, config in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found
