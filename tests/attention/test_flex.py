"""The flex_attention backend serves a model. The contract is in tests/conformance, for `make test-all`."""

from __future__ import annotations

import pytest

from shared.engine.llm import LLM
from shared.types import SamplingParams

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.mark.full
def test_it_gives_the_answers_of_the_reference() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    answers = []
    for choice in ("reference", "flex_attention"):
        llm = LLM("tiny-dense", device="cpu", panel="reference", use={"attention": choice})
        answers.append(llm.generate([llm.tokenizer.chat(QUESTION), "one two"], params, progress=False))
    assert [a.output_ids for a in answers[0]] == [a.output_ids for a in answers[1]]


@pytest.mark.gpu
def test_it_serves_the_optimized_panel() -> None:
    llm = LLM("tiny-dense", panel="optimized", use={"attention": "flex_attention"}, max_total_tokens=4096)
    assert "42" in llm.generate(llm.tokenizer.chat(QUESTION), SamplingParams(temperature=0.0)).text
