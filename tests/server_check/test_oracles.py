"""Any folder or file that the engine loads is an oracle: its logits are those of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.server.oracle import Oracle
from tests.models.model_harness import random_hf_model

FAST = ("gpt-oss", "deepseek-v3", "gemma4-moe")
DYNAMIC = "llama-dynamic"  # transformers turns all tokens by the length of the whole text, servers do not
PROMPT = [(7 * i) % 300 for i in range(60)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.full)
        for name in CONFIGS
        if name != DYNAMIC
    ],
)
def test_a_folder_of_each_family(name: str, tmp_path: Path) -> None:
    model = random_hf_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    for file in resolve_model_path("tiny-dense").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    found = torch.from_numpy(Oracle(tmp_path).logits(PROMPT))
    with torch.no_grad():
        expected = model.float()(torch.tensor([PROMPT])).logits[0, :, : found.shape[1]]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-hybrid", "tiny-dense-int4", "tiny-dense-fp8"])
def test_a_built_in_model(name: str) -> None:
    logits = Oracle(name).logits(PROMPT)
    assert logits.shape == (len(PROMPT), 1871)
    assert np.isfinite(logits).all()
