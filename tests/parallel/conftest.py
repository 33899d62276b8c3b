"""Models of the tests of several ranks."""

from __future__ import annotations

import json

import pytest

from tests.parallel.tiny_ranks import EAGLE, LLAMA, QWEN3_MOE


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json alone: the weights are random."""
    found = {}
    for name, config in (("llama", LLAMA), ("qwen3-moe", QWEN3_MOE), ("eagle-draft", EAGLE)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found
