"""Grammars and logit processors on a GPU: the model replays its graphs, and answers are the reference's."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from tests.grammar.test_llm import answers
from tests.grammar.test_processors import count_up, no_repeats, run

from .harness import computed_once, name_of, optimized, reference

pytestmark = pytest.mark.gpu

FLAGS: dict[str, Any] = {"dtype": "float32", "use": {"attention": "triton"}}  # which takes float32
SPECULATION = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    SPECULATION,
    {**SPECULATION, "speculative_topk": 1, "speculative_num_steps": 4},
    {"chunked_prefill_size": 7, "enable_mixed_chunk": True},
)


@computed_once
def expected() -> tuple[list[list[int]], list[list[int]]]:
    llm = reference("tiny-dense", dtype="float32")
    return answers(llm), run(llm, None, no_repeats, count_up)


@pytest.mark.parametrize("flags", SWITCHES, ids=name_of)
def test_answers_are_the_references(flags: dict[str, Any]) -> None:
    llm = optimized("tiny-dense", **FLAGS, **flags)
    assert (answers(llm), run(llm, None, no_repeats, count_up)) == expected()
    assert num_replays(llm) > 0


def num_replays(llm: LLM) -> int:
    runner: Any = llm.assembly.parts.model_runner
    replays: int = runner.replays.steps
    return replays
