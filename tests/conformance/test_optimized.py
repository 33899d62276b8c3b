"""The optimized panel on a CPU: a few tokens through Triton's interpreter, in lockstep with the reference.

What a GPU shows better is in tests/gpu; this keeps every change honest where there is none.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.conformance.diff.lockstep import Lockstep
from diptych.shared.tools.conformance.diff.outcome import Outcome
from diptych.shared.types import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu has the same for kernels as compiled"
)

GREEDY = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
TEXTS = ("Mara has a red kite.", "Mara has a red cat.", "7")
USE = {"attention": "triton"}
"""The backend that needs no library of kernels."""


@pytest.fixture
def folder(model: str, tmp_path: Path) -> str:
    """The first two layers of a built-in model: all layers are alike, and the interpreter is slow."""
    names = {path.name for path in (ASSETS / model).iterdir()} - {"config.json", "model.safetensors"}
    for name in names:
        shutil.copy(ASSETS / model / name, tmp_path)
    config = json.loads((ASSETS / model / "config.json").read_text()) | {"num_hidden_layers": 2}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(ASSETS / model / "model.safetensors")
    kept = {name: x for name, x in weights.items() if ".layers." not in name or int(name.split(".")[2]) < 2}
    assert 0 < len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors")
    return str(tmp_path)


def lockstep(folder: str, dtype: str, **flags: Any) -> Outcome:
    common = {"model": folder, "device": "cpu", "dtype": dtype, "max_total_tokens": 512}
    a = LLM(**common, panel="reference")
    b = LLM(
        **{
            **common,
            "panel": "optimized",
            "use": USE,
            "max_running_requests": 4,
            "cuda_graph_bs": (4,),
            **flags,
        }
    )
    assert {"attention": "triton", "models": "optimized"}.items() <= b.describe().items()
    prompts = [a.tokenizer.encode(text) for text in TEXTS]
    outcome = Lockstep(a, b, teacher_forced=dtype != "float32").run(prompts, GREEDY)
    assert outcome.divergence is None, outcome.divergence.rows()
    assert outcome.finished
    assert outcome.num_tokens > 12
    assert {"rotary", "attention", "logits", "ids"} <= set(outcome.worst)
    return outcome


@pytest.mark.parametrize("model", ["tiny-dense", pytest.param("tiny-moe", marks=pytest.mark.full)])
def test_float32_is_exact(folder: str) -> None:
    """With pages, and prompts in chunks that share a step with decoding and find each other's prefix."""
    flags = {"page_size": 4, "chunked_prefill_size": 8, "enable_mixed_chunk": True}
    outcome = lockstep(folder, "float32", **flags)
    assert outcome.near_ties == []
    assert outcome.num_one_sided[0] > 0, "no prefix came from the cache"


@pytest.mark.parametrize(("model", "dtype"), [("tiny-dense", "float16"), ("tiny-moe", "bfloat16")])
@pytest.mark.full  # in the fast cut, the clauses of models have half types
def test_half_types_are_close(model: str, folder: str, dtype: str) -> None:
    """With A's tokens, and of a mixture of experts with A's experts."""
    outcome = lockstep(folder, dtype, page_size=16)
    assert ("experts" in outcome.worst) == (model == "tiny-moe")
