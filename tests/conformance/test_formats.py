"""Losses of number formats: their arithmetic, and log-probabilities as transformers has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.tools.conformance.whole_engine.accuracy import Limit, excess
from diptych.shared.tools.conformance.whole_engine.formats import (
    AccuracyCase,
    AccuracyResult,
    Inputs,
    built_in_inputs,
    chunks_of,
    flags_of,
    score_texts,
)


def result(answers: list[str], exact: float | None, logprobs: list[float]) -> AccuracyResult:
    return AccuracyResult(AccuracyCase("x", {}), answers, exact, logprobs, 0, 0)


def test_formats_are_flags_and_a_plus_combines_them() -> None:
    assert flags_of("int4") == {"quantization": "int4"}
    assert flags_of("fp8+fp8-kv") == {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int5", "no format 'int5'; there are fp32"),
        ("fp8+int8", "format fp8.int8: quantization is given twice"),
    ],
)
def test_wrong_formats_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flags_of(name)


def test_a_text_is_cut_into_chunks() -> None:
    assert chunks_of([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        chunks_of([1, 2], 1)
    assert Inputs([], [[1, 2], [5]]).num_tokens == 1
    with pytest.raises(ValueError, match="nothing to measure"):
        Inputs([], [[5]])


def test_losses_against_a_baseline() -> None:
    baseline = result(["a", "b"], 1.0, [math.log(0.5), math.log(0.25)])
    assert baseline.perplexity == pytest.approx(8**0.5)
    worse = result(["a", "c"], 0.5, [math.log(0.25), math.log(0.5)])
    loss = worse.compared_with(baseline)
    assert (loss.exact, loss.same_answers) == (0.5, 0.5)
    assert loss.perplexity == pytest.approx(0), "one token is likelier by what the other loses"
    assert loss.logprob == pytest.approx(math.log(2))
    assert excess(loss, Limit(0.5, 0.1, 0.7, "")) == []
    assert len(excess(loss, Limit(0.4, 0.1, 0.6, ""))) == 2
    nothing = result([], None, [])
    assert excess(nothing.compared_with(nothing), Limit(0, 0, 0, "")) == []


@pytest.mark.full
def test_log_probabilities_equal_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    folder = resolve_model_path("tiny-dense")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM("tiny-dense", device="cpu", chunked_prefill_size=64)
    assert llm.tokenizer is not None
    texts = list(built_in_inputs(llm.tokenizer, 0, 4).texts)
    seen: list[int] = []
    ours = score_texts(llm, texts, seen.append)
    theirs: list[float] = []
    for text in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, :-1]
        theirs += logits.log_softmax(1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    assert ours == pytest.approx(theirs, abs=1e-4)  # float32 sums in another order
    assert seen[-1] == len(ours), "all tokens are reported to the progress bar"
