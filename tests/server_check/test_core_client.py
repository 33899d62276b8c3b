"""The client of `diptych check server`: formats of several servers, and what this project's server offers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diptych.shared.tools.conformance.server.answer import Answer, Malformed, read_answer
from diptych.shared.tools.conformance.server.capabilities import Offers, probe
from diptych.shared.tools.conformance.server.checks import QUICK, Check, Finding, Result, chosen
from diptych.shared.tools.conformance.server.client import Refused, Server, Unreachable, join_chunks
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.session import connect, find_rows, timeout_of
from tests.server_check.local_server import LocalServer

TEXT = "Mara is a baker. Mara lives in Bergen. In which city"


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("tiny-dense")


@pytest.fixture(scope="module")
def server(correct_server: LocalServer, oracle: Oracle) -> Iterator[Server]:
    client = Server(correct_server.url + "/v1/", token_ids=oracle.id_of_text)
    client.find_model()
    yield client
    client.close()


@pytest.fixture(scope="module")
def offers(server: Server, oracle: Oracle) -> Offers:
    ids = oracle.tokenizer.encode(TEXT)
    return probe(server, ids, TEXT)


def test_what_this_server_offers(offers: Offers) -> None:
    assert offers.kind == "diptych"
    assert offers.scoring == ("echo", "prompt_logprobs", "generated")
    assert offers.num_top_logprobs == 20
    missing = {name for name, value in vars(offers).items() if value is False}
    assert missing == set() == set(offers.reasons)


def test_prompt_and_continuation_are_the_oracles(server: Server, offers: Offers, oracle: Oracle) -> None:
    prompt = oracle.tokenizer.encode(TEXT)
    params: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "logprobs": 5}
    (answer,) = server.complete(prompt, echo=True, **params)
    assert answer.token_ids is not None
    assert answer.prompt_logprobs is not None
    assert answer.logprobs is not None
    output, _ = oracle.greedy(prompt, 4)
    assert list(answer.token_ids) == output
    text = prompt + output
    expected = oracle.logprobs(text)[np.arange(len(text) - 1), text[1:]]
    assert answer.prompt_logprobs[0] is None
    actual = np.array([*answer.prompt_logprobs[1:], *answer.logprobs], dtype=np.float64)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    (streamed,) = server.stream(prompt, **params)
    assert streamed.token_ids == answer.token_ids
    assert streamed.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert TEXT + streamed.text == answer.text
    assert streamed.usage is not None
    assert streamed.usage["total_tokens"] == len(text)


@pytest.mark.parametrize("num_rows", [1871, 1920])
def test_rows_of_the_head_are_found(num_rows: int, oracle: Oracle) -> None:
    """A server whose softmax covers the tokens, and one whose softmax covers the padding rows as well."""
    text = oracle.tokenizer.encode(TEXT)

    def complete(prompt: list[int], **params: Any) -> list[Answer]:
        oracle.num_rows = num_rows
        row = oracle.logprobs(prompt)[-1]
        best = int(row.argmax())
        return [Answer((best,), ("",), "", (float(row[best]),), None, None, "length", None, {})]

    found = Offers(token_id_prompts=True, completion_logprobs=True, generated_ids=True)
    server: Any = SimpleNamespace(complete=complete)
    assert find_rows(server, found, oracle, random.Random(0)) == num_rows
    assert oracle.logprobs(text).shape == (len(text), num_rows)
    oracle.num_rows = oracle.vocab_size


def test_refusals_and_dead_servers(server: Server) -> None:
    with pytest.raises(Refused) as caught:
        server.complete([1], max_tokens=-1)
    assert caught.value.status == 400
    with pytest.raises(Unreachable, match="ConnectError"):
        Server("http://127.0.0.1:9").find_model()
    assert server.at_once([partial(int, i) for i in range(5)], concurrency=2) == [0, 1, 2, 3, 4]


def test_an_answer_may_take_longer_in_a_long_check() -> None:
    assert timeout_of(float("inf")) == timeout_of(time.monotonic() + 900) == 120
    assert 890 < timeout_of(time.monotonic() + 21600) <= 900


def test_oracle_knows_the_distribution(oracle: Oracle) -> None:
    prompt = oracle.tokenizer.encode(TEXT)
    exact = oracle.exact(prompt, temperature=0.7, top_k=3)
    assert (exact > 0).sum() == 3
    assert exact.sum() == pytest.approx(1.0)
    assert oracle.exact(prompt, temperature=0.0).argmax() == exact.argmax()
    with pytest.raises(ValueError, match="token ids must be in"):
        oracle.logits([oracle.config.vocab_size])


LLAMA_CPP = {
    "index": 0,
    "text": " a",
    "finish_reason": "length",
    "logprobs": {
        "content": [
            {
                "id": 7,
                "token": " a",
                "bytes": [32, 97],
                "logprob": -0.5,
                "top_logprobs": [
                    {"id": 7, "token": " a", "bytes": [32, 97], "logprob": -0.5},
                    {"id": 9, "token": " b", "bytes": [32, 98], "logprob": -3.4e38},
                ],
            }
        ]
    },
}
TEXTS = {
    "index": 0,
    "text": "x a",
    "finish_reason": "stop",
    "logprobs": {
        "tokens": ["x", " a"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {" a": -0.5, " b": -9999.0}],
        "text_offset": [0, 1],
    },
}
VLLM = {
    "index": 0,
    "text": " a",
    "finish_reason": "length",
    "token_ids": [7],
    "logprobs": None,
    "prompt_logprobs": [
        None,
        {
            "5": {"logprob": -2.0, "rank": 2, "decoded_token": "y"},
            "6": {"logprob": -1.0, "rank": 1, "decoded_token": "z"},
        },
    ],
}


@pytest.mark.parametrize(("choice", "num_prompt"), [(LLAMA_CPP, 0), (TEXTS, 1)], ids=["entries", "lists"])
def test_formats_of_logprobs(choice: dict[str, Any], num_prompt: int) -> None:
    answer = read_answer(choice, {}, choice, num_prompt, num_prompt > 0, {" a": 7, " b": 9})
    assert answer.token_ids == (7,)
    assert answer.logprobs == (-0.5,)
    assert answer.top_logprobs == ({7: -0.5, 9: -np.inf},)
    assert answer.prompt_logprobs == ((None,) if num_prompt else None)


def test_prompt_logprobs_of_vllm() -> None:
    answer = read_answer(VLLM, {}, VLLM, 2, False, {})
    assert answer.prompt_logprobs == (None, -2.0)
    assert answer.token_ids == (7,)
    assert answer.logprobs is None


def test_what_cannot_be_read() -> None:
    broken = {**TEXTS, "logprobs": {"tokens": ["x"], "token_logprobs": []}}
    with pytest.raises(Malformed, match="1 tokens, 0 logprobs"):
        read_answer(broken, {}, broken, 0, False, {})
    with pytest.raises(Malformed, match="an error in the stream"):
        join_chunks([{"error": {"message": "boom"}}])


def test_statuses_and_choice_of_checks() -> None:
    one = Check("scoring.x", "", "", lambda context: Finding("holds"))
    assert Result(one, (Finding("holds"), Finding("fails"))).status == "fails"
    assert Result(one, (Finding("not offered"), Finding("near tie"))).status == "near tie"
    assert Result(one, (Finding("not offered"),)).num_cases == 0
    with pytest.raises(ValueError, match="no check or group nonsense"):
        chosen(only=["nonsense"])


def test_context_of_a_run(server: Server, oracle: Oracle) -> None:
    """Prompts repeat with the seed, and their text has the same ids again."""
    contexts = [
        connect(server.url, "tiny-dense", oracle=oracle, limits=QUICK, seed=seed) for seed in (3, 3, 4)
    ]
    assert contexts[0].prompts == contexts[1].prompts != contexts[2].prompts
    first = contexts[0]
    assert first.dtype == "bfloat16"
    assert oracle.tokenizer.encode(oracle.tokenizer.decode(first.prompts[0])) == first.prompts[0]
    assert first.prompt_of([5, 6]) == [5, 6]
    with pytest.raises(ValueError, match="no server answers"):
        connect("http://127.0.0.1:9", "tiny-dense", oracle=oracle)
    with pytest.raises(ValueError, match="--dtype must be auto or one of float32"):
        connect(server.url, "tiny-dense", oracle=oracle, dtype="fp3")
