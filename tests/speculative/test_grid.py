"""The text of no speculation, to the token: real models, trees of every shape, one request and seven."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.oracles.speculative_harness import shape_of
from diptych.shared.types import DraftShape, SamplingParams

PROMPTS = (
    "Count from 3 to 20.",
    "Repeat this sentence: Mara has the red kite.",
    "What is 12 + 30?",
    "Say the word kite 9 times.",
    "Repeat this sentence: Bo has the blue drum.",
    "Count from 40 to 45.",
    "Write a JSON record about a baker named Mara.",
)
NUM_NEW_TOKENS = 14
SHAPES = tuple(dict.fromkeys(shape_of(*numbers) for numbers in product((1, 3, 5), (1, 2, 4), (2, 8, 16))))
PAGE_SIZES = (1, 4, 16)
SCHEDULERS = ("reference", "optimized")
CASES = [  # the fast cut has every second shape, each with one page size
    pytest.param(shape, page_size, SCHEDULERS[(i + k) % 2], marks=[] if i % 6 == 2 * k else pytest.mark.full)
    for i, shape in enumerate(SHAPES)
    for k, page_size in enumerate(PAGE_SIZES)
]


def answers(**flags: Any) -> list[list[int]]:
    """The first prompt alone, then all seven at once."""
    llm = LLM(model="tiny-dense", panel="reference", device="cpu", max_total_tokens=1024, **flags)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW_TOKENS)
    batches = (prompts[:1], prompts)
    outputs = [output for batch in batches for output in llm.generate(batch, params, progress=False)]
    if llm.config.speculative:
        assert llm.stats().speculation.num_accepted_tokens > 0
    return [output.output_ids for output in outputs]


@pytest.fixture(scope="module")
def plain_answers() -> list[list[int]]:
    return answers()


@pytest.mark.parametrize(("shape", "page_size", "scheduler"), CASES, ids=str)
def test_text_is_that_of_no_speculation(
    shape: DraftShape, page_size: int, scheduler: str, plain_answers: list[list[int]]
) -> None:
    found = answers(
        speculative="eagle3",
        speculative_draft_model="tiny-dense-eagle3",
        speculative_num_steps=shape.num_steps,
        speculative_topk=shape.top_k,
        speculative_num_draft_tokens=shape.num_draft_tokens,
        page_size=page_size,
        use={"scheduler": scheduler},
        check_invariants=True,
    )
    assert found == plain_answers
