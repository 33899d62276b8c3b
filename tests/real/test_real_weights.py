"""SmolLM2-135M-Instruct: number formats and modes against float32, and llama.cpp on the same file.
`make test-real` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.real.fetch import FILE, SITE
from tests.real.llama_cpp import post, running, scored
from tests.real.measure import (
    CODE,
    FORMAT_FLAGS,
    FP32,
    MODES,
    PROSE,
    answers,
    compared,
    distributions,
    engine,
    text_ids,
)

pytestmark = pytest.mark.real

LARGEST_KL = {"bf16": 0.01, "fp16": 1e-4, "fp8": 0.1, "fp8-block": 0.1, "int8": 0.1, "int4": 1.5}
LARGEST_KL |= {"fp8-kv": 0.1, "fp8+fp8-kv": 0.15}
"""Mean over the text, in nats."""


class Baseline:
    """The plain engine in float32."""

    def __init__(self) -> None:
        llm = engine("reference", **FP32)
        self.tokenizer, self.ids = llm.tokenizer, text_ids(llm)
        self.expected, self.answers = distributions(llm, self.ids), answers(llm)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        self.answer: Any = llm.chat(question, temperature=0, progress=False)


@pytest.fixture(scope="module")
def base() -> Baseline:
    return Baseline()


def test_it_answers(base: Baseline) -> None:
    assert base.answer.text == "The capital of France is Paris."


@pytest.mark.parametrize("name", FORMAT_FLAGS)
def test_formats(name: str, base: Baseline) -> None:
    found = distributions(engine("reference", **FORMAT_FLAGS[name]), base.ids)
    assert compared(base.expected, found, base.ids)["kl"] < LARGEST_KL[name]


@pytest.mark.parametrize("name", MODES)
def test_modes(name: str, base: Baseline) -> None:
    llm = engine("reference", **FP32, **MODES[name])
    found = compared(base.expected, distributions(llm, base.ids), base.ids)
    assert found["largest_kl"] < 1e-6
    assert found["rms"] < 1e-4
    assert answers(llm) == base.answers


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[str]:
    if not SITE.is_dir():
        pytest.skip("llama.cpp's server is not in build/real")
    with running(FILE) as url:
        yield url


def test_token_ids_are_those_of_llama_cpp(llama_cpp: str, base: Baseline) -> None:
    tokenizer: Any = base.tokenizer
    chat = tokenizer.render([{"role": "user", "content": "What is 12 + 30?"}])
    for text in (PROSE, CODE, chat, "Grüße, 東京 — it's 45678!\t\n\n  x"):
        body = {"content": text, "add_special": False, "parse_special": True}
        assert tokenizer.encode(text) == post(f"{llama_cpp}/tokenize", body)["tokens"]


def test_probabilities_are_those_of_llama_cpp(llama_cpp: str, base: Baseline) -> None:
    """It rounds the inputs of each matrix to 8 bits."""
    found = scored(llama_cpp, base.expected, base.ids)
    assert found["kl"] < 0.1
    assert found["same_best"] > 0.8
