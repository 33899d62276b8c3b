"""Over HTTP the model gives the texts of the offline engine (L2), and so its score (L6)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import score
from diptych.shared.types import SamplingParams
from tests.server.running import RunningServer, openai_client, serving

NUM_QUESTIONS = 20  # one of each kind
FLAGS = {
    "chunks and retraction": (
        "--chunked-prefill-size",
        "16",
        "--max-total-tokens",
        "1024",
        "--page-size",
        "4",
    ),
    "speculation": ("--speculative", "ngram"),
    "no cache": ("--disable-radix-cache", "--schedule-policy", "lof"),
}


@pytest.fixture(scope="module")
def offline() -> list[str]:
    """Greedy texts of the questions."""
    llm = LLM(model="tiny-dense")
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.chat(question.messages) for question in held_out_questions(NUM_QUESTIONS)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_new_tokens=128))
    return [output.text for output in outputs]


def texts_over_http(server: RunningServer, chats: list[Any], is_stream: bool) -> list[str]:
    """Eight at one time."""
    client = openai_client(server)

    def ask(messages: Any) -> str:
        body = {"model": "tiny-dense", "messages": messages, "temperature": 0, "max_tokens": 128}
        if not is_stream:
            answer = client.chat.completions.create(**body)
            return answer.choices[0].message.content or ""
        chunks = client.chat.completions.create(stream=True, **body)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(ask, chats))


def expect_texts_and_score(server: RunningServer, offline: list[str]) -> None:
    questions = held_out_questions(NUM_QUESTIONS)
    scores = [score(lambda chats: offline, questions).exact]
    for is_stream in (False, True):
        texts = texts_over_http(server, [question.messages for question in questions], is_stream)
        assert texts == offline
        scores.append(score(lambda chats, texts=texts: texts, questions).exact)  # type: ignore[misc]
    server.wait_idle()
    assert scores[0] > 0.9
    assert scores == [scores[0]] * 3


@pytest.mark.full  # in the fast cut, tests/server_check/test_server_diff.py compares texts
def test_texts_and_score_are_those_of_the_offline_engine(server: RunningServer, offline: list[str]) -> None:
    expect_texts_and_score(server, offline)


@pytest.mark.full
@pytest.mark.parametrize("name", FLAGS)
def test_with_other_flags(name: str, offline: list[str]) -> None:
    with serving("--separate-process", *FLAGS[name]) as server:
        expect_texts_and_score(server, offline)
