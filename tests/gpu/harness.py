"""Engines on the GPU: the optimized panel and the reference."""

from __future__ import annotations

from functools import cache
from typing import Any

from diptych.shared import registry
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.whole_engine.switches import answers_with_alternatives
from diptych.shared.types import GenerateOutput

MODELS = ("tiny-dense", "tiny-moe")
REFERENCE = {"device": "cuda", "panel": "reference"}
OPTIMIZED = {
    "device": "cuda",
    "panel": "optimized",
    "max_running_requests": 8,
    "cuda_graph_max_tokens": 256,
    "skip_warmup": True,
}
"""A small batch size and few tokens, so that few graphs are captured. Kernels are compiled when a test needs
them: no engine of a test uses all that it could."""


def attention_backends() -> list[str]:
    """Every registered backend except the reference, once each."""
    by_target = {target: name for name, target in registry.IMPLEMENTATIONS["attention"].items()}
    return sorted(name for name in by_target.values() if name != "reference")


def graph_backends() -> list[str]:
    """Those whose decode steps are replayed."""
    return [name for name in attention_backends() if name != "flex_attention"]


def with_attention(backend: str | None) -> dict[str, Any]:
    return {"use": {"attention": backend}} if backend is not None else {}


def reference(model: str, **flags: Any) -> LLM:
    return LLM(model=model, **{**REFERENCE, "max_total_tokens": 8192, **flags})


def optimized(model: str, backend: str | None = None, **flags: Any) -> LLM:
    """`backend` None: the default of the panel."""
    return LLM(model=model, **{**OPTIMIZED, "max_total_tokens": 8192, **with_attention(backend), **flags})


@cache
def reference_answers(model: str, dtype: str = "float32") -> list[GenerateOutput]:
    """Runs all prompts in one batch on the GPU. Batch invariance is tested elsewhere."""
    return answers_with_alternatives(model, **REFERENCE, dtype=dtype, max_total_tokens=8192)


def name_of(value: Any) -> str:
    """A test id: flags as on the command line."""
    if not isinstance(value, dict):
        return str(value)
    return ",".join(f"{name}={value}" for name, value in value.items()) or "default"
