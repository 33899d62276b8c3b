"""Level L2: the optimized panel computes what the reference computes, op by op and token by token."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.diff.lockstep import Lockstep
from diptych.shared.tools.conformance.diff.outcome import Outcome
from diptych.shared.tools.conformance.diff.recorder import SAMPLED_IDS
from diptych.shared.tools.conformance.whole_engine.switches import prompts
from diptych.shared.types import SamplingParams

from .harness import MODELS, attention_backends, graph_backends, name_of, optimized, reference

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"page_size": 16},
    {"page_size": 16, "chunked_prefill_size": 48, "enable_mixed_chunk": True},
)


def run(a: LLM, b: LLM, **options: Any) -> Outcome:
    outcome = Lockstep(a, b, labels=("reference", "optimized"), **options).run(prompts(a), GREEDY)
    assert outcome.divergence is None, outcome.divergence.rows()
    assert outcome.finished
    assert outcome.num_tokens > 100
    return outcome


@pytest.mark.parametrize("flags", FLAGS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_float32_is_exact(model: str, flags: dict[str, Any]) -> None:
    outcome = run(reference(model, dtype="float32"), optimized(model, "triton", dtype="float32", **flags))
    assert outcome.near_ties == []
    kinds = {"rotary", "attention", "logits", "ids", "layer" if model == "tiny-dense" else "mlp"}
    assert kinds <= set(outcome.worst), "too little of the model was looked at"


BACKENDS = [("tiny-dense", backend, FLAGS[2]) for backend in attention_backends()]
BACKENDS += [("tiny-moe", backend, FLAGS[0]) for backend in attention_backends()]
"""Mixed chunks have prompts and decoding in one step, so they take the longest to compare."""


@pytest.mark.parametrize(("model", "backend", "flags"), BACKENDS, ids=name_of)
def test_bfloat16_is_close(model: str, backend: str, flags: dict[str, Any]) -> None:
    """With A's tokens and, in a mixture of experts, A's experts: every op of every token is compared."""
    a, b = reference(model, dtype="bfloat16"), optimized(model, backend, dtype="bfloat16", **flags)
    outcome = run(a, b, teacher_forced=True)
    num_tokens_part = sum(tie.op == SAMPLED_IDS for tie in outcome.near_ties)
    assert num_tokens_part <= outcome.num_tokens // 20
    # One choice per layer. On a CPU, in Triton's interpreter, 1 to 2 % of them differ.
    num_choices = outcome.num_tokens * a.model_config.num_hidden_layers
    assert len(outcome.near_ties) - num_tokens_part <= num_choices // 20


@pytest.mark.parametrize("backend", graph_backends())
def test_replayed_steps_are_close_too(backend: str) -> None:
    """With graphs on, logits and tokens of a decode step are compared. A mixture of experts is excluded: a
    router's near tie inside a graph is not recorded, and logits then differ by any amount. For both models
    tests/model_runner/test_graphs.py compares replayed steps with launched ones, bit by bit."""
    a, b = reference("tiny-dense", dtype="bfloat16"), optimized("tiny-dense", backend, dtype="bfloat16")
    run(a, b, graphs=True, teacher_forced=True)
    assert b.assembly.parts.model_runner.replays.steps >= GREEDY.max_new_tokens - 1
