"""The flex_attention backend serves a model. The contract is in tests/conformance, for `make test-all`."""

from __future__ import annotations

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.mark.full
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_it_gives_the_answers_of_the_reference(kv_cache_dtype: str) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    answers = []
    for choice in ("reference", "flex_attention"):
        flags = {"device": "cpu", "panel": "reference", "kv_cache_dtype": kv_cache_dtype}
        llm = LLM("tiny-dense", use={"attention": choice}, **flags)
        answers.append(llm.generate([llm.tokenizer.chat(QUESTION), "one two"], params, progress=False))
    assert [a.output_ids for a in answers[0]] == [a.output_ids for a in answers[1]]


@pytest.mark.gpu
def test_it_serves_the_optimized_panel() -> None:
    llm = LLM("tiny-dense", panel="optimized", use={"attention": "flex_attention"}, max_total_tokens=4096)
    assert "42" in llm.generate(llm.tokenizer.chat(QUESTION), SamplingParams(temperature=0.0)).text
    prompt = list(range(5, 105))  # alone: 100 queries, whose heads are more than 128 rows for a KV head
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    expected = LLM("tiny-dense", panel="reference", dtype="float32", device="cuda").generate(prompt, params)
    llm = LLM("tiny-dense", dtype="float32", use={"attention": "flex_attention"}, max_total_tokens=4096)
    assert llm.generate(prompt, params).output_ids == expected.output_ids
