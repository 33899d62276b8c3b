"""The optimized panel on a CPU: a few tokens through Triton's interpreter, in lockstep with the reference.

What a GPU shows better is in tests/gpu; this keeps every change honest where there is none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.conformance.lockstep import Lockstep
from shared.conformance.outcome import Outcome
from shared.engine.llm import LLM
from shared.types import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu has the same for kernels as compiled"
)

GREEDY = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
TEXTS = ("Mara has a red kite.", "Mara has a red cat.", "7")
USE = {"attention": "triton"}
"""The backend that needs no library of kernels."""


def lockstep(model: str, dtype: str, **flags: Any) -> Outcome:
    common = {"model": model, "device": "cpu", "dtype": dtype, "max_total_tokens": 512}
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


@pytest.mark.parametrize("model", [pytest.param("tiny-dense", marks=pytest.mark.full), "tiny-moe"])
def test_float32_is_exact(model: str) -> None:
    """With pages, and prompts in chunks that share a step with decoding and find each other's prefix."""
    flags = {"page_size": 4, "chunked_prefill_size": 8, "enable_mixed_chunk": True}
    outcome = lockstep(model, "float32", **flags)
    assert outcome.near_ties == []
    assert outcome.num_one_sided[0] > 0, "no prefix came from the cache"


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("tiny-dense", "float16"), pytest.param("tiny-moe", "bfloat16", marks=pytest.mark.full)],
)
def test_half_types_are_close(model: str, dtype: str) -> None:
    """With A's tokens, and of a mixture of experts with A's experts."""
    outcome = lockstep(model, dtype, page_size=16)
    assert ("experts" in outcome.worst) == (model == "tiny-moe")
