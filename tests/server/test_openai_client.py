"""OpenAI's own client against a real server process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from tests.server.running import RunningServer, openai_client

if TYPE_CHECKING:
    import openai

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
STORY = [{"role": "user", "content": "Count from 3 to 12."}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai_client(server)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="tiny-dense")


def stream_text(client: openai.OpenAI, **body: object) -> dict[int, str]:
    """The concatenated content of each choice; asserts the rules of chunks on the way."""
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    ids = set()
    for chunk in client.chat.completions.create(model="tiny-dense", stream=True, **body):  # type: ignore[call-overload]
        ids.add((chunk.id, chunk.created, chunk.model, chunk.object))
        for choice in chunk.choices:
            if choice.index not in texts:
                assert (choice.delta.role, choice.delta.content) == ("assistant", "")
                assert list(texts) == list(range(choice.index)), "role chunks come in order"
                texts[choice.index] = ""
                continue
            assert choice.index not in finishes, "a chunk after the finish"
            assert choice.delta.role is None
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                assert choice.delta.content is None
                finishes[choice.index] = choice.finish_reason
    assert len(ids) == 1
    assert set(finishes) == set(texts)
    return texts


def test_an_answer_equals_the_offline_engines(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny-dense", messages=SUM, temperature=0)
    assert llm.tokenizer is not None
    offline = llm.generate(llm.tokenizer.chat(SUM), SamplingParams(temperature=0))
    assert answer.choices[0].message.content == offline.text == "12 + 30 = 42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == offline.num_prompt_tokens
    assert answer.usage.completion_tokens == offline.num_output_tokens


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.2, "seed": 7, "n": 3, "max_tokens": 40},
        {"temperature": 0, "stop": ["8"]},
        {"temperature": 0, "stop": ["7, 8", "9"], "extra_body": {"include_stop_str_in_output": True}},
        {"temperature": 0.9, "seed": 1, "top_p": 0.8, "presence_penalty": 0.5, "max_completion_tokens": 12},
    ],
    ids=["greedy", "three samples", "stop", "stop kept", "filters"],
)
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, sampling: dict[str, object]) -> None:
    whole = client.chat.completions.create(model="tiny-dense", messages=STORY, **sampling)  # type: ignore[call-overload]
    streamed = stream_text(client, messages=STORY, **sampling)
    assert streamed == {choice.index: choice.message.content or "" for choice in whole.choices}


def test_stop_ends_before_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny-dense", messages=STORY, temperature=0, stop="8")
    assert answer.choices[0].message.content == "3, 4, 5, 6, 7, "
    assert answer.choices[0].finish_reason == "stop"


def test_length_and_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny-dense", messages=STORY, temperature=0, max_tokens=4, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "length"


def test_cached_prompt_tokens_are_reported(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.chat.completions.create(model="tiny-dense", messages=STORY, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    arguments = {
        "model": "tiny-dense",
        "messages": SUM,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode()
    assert text == answer.choices[0].message.content  # the last entry is the end-of-sequence token
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the best one
    streamed = [
        entry
        for chunk in client.chat.completions.create(stream=True, **arguments)  # type: ignore[call-overload]
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_completions_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny-dense", prompt="Mara lives in", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith("Mara lives in")
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for offset, token in zip(logprobs.text_offset, logprobs.tokens):
        assert choice.text[offset:].startswith(token) or offset == len(choice.text)
    for token, value, top in zip(logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:]):
        assert top[token] == value


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_index_the_text(server: RunningServer, client: openai.OpenAI, skip: bool) -> None:
    """Special tokens, such as those of a chat template, are in the text only if they are not skipped."""
    body = {"messages": [{"role": "user", "content": "naïve 🙂 日"}]}
    prompt = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    answer = client.completions.create(
        model="tiny-dense", prompt=prompt, max_tokens=3, echo=True, logprobs=0, temperature=0,
        extra_body={"skip_special_tokens": skip},
    )  # fmt: skip
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert ("<|" in text) is not skip
    places = [
        (offset, token) for offset, token in zip(logprobs.text_offset, logprobs.tokens) if token in text
    ]
    assert all(text[offset:].startswith(token) for offset, token in places)
    assert len(places) > 10
    assert logprobs.text_offset[-1] + len(logprobs.tokens[-1]) == len(text)


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_usage_of_every_chunk(client: openai.OpenAI, route: str, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    body = {"model": "tiny-dense", "stream": True, "stream_options": options, "max_tokens": 12}
    if route == "chat":
        stream = client.chat.completions.create(messages=STORY, **body)  # type: ignore[call-overload]
    else:
        stream = client.completions.create(
            prompt="Count:", extra_body={"ignore_eos": True, "return_token_ids": True}, **body
        )  # type: ignore[call-overload]
    chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert all(chunk.usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 0 for chunk in chunks)
    assert bool(chunks[-1].choices) is not include_usage
    if route == "completions":
        sizes = [len(choice.token_ids) for chunk in chunks for choice in chunk.choices]
        assert counts[: len(sizes)] == [sum(sizes[: i + 1]) for i in range(len(sizes))]


def test_completions_of_a_list(client: openai.OpenAI) -> None:
    one_by_one = [
        client.completions.create(model="tiny-dense", prompt=p, max_tokens=5, temperature=0).choices[0].text
        for p in ("Otto has", "Mara lives in")
    ]
    answer = client.completions.create(
        model="tiny-dense", prompt=["Otto has", "Mara lives in"], max_tokens=5, temperature=0, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == [one_by_one[i // 2] for i in range(4)]


def test_logit_bias_bans_and_forces(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    forced = llm.tokenizer.encode("7", add_special_tokens=False)[-1]
    answer = client.chat.completions.create(
        model="tiny-dense", messages=SUM, temperature=0, max_tokens=3, logit_bias={str(forced): 100}
    )
    assert answer.choices[0].message.content == "777"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"messages": SUM, "extra_body": {"temprature": 1}}, 400, "temprature"),
        ({"messages": SUM, "temperature": -1}, 400, "temperature"),
        ({"messages": SUM, "n": 10**6}, 400, "n"),
        ({"messages": SUM, "max_tokens": 10**6}, 400, "context"),
        ({"messages": []}, 400, "messages"),
        ({"messages": SUM, "logit_bias": {"99999999": 1}}, 400, "vocabulary"),
        ({"messages": SUM, "top_logprobs": 3}, 400, "logprobs"),
        ({"messages": SUM, "extra_body": {"best_of": 2}}, 400, "best_of"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, 400, "tokens"),
        ({"messages": SUM, "model": "gpt-4"}, 404, "gpt-4"),
    ],
)
def test_bad_requests_say_what_is_wrong(
    client: openai.OpenAI, body: dict[str, object], status: int, said: str
) -> None:
    import openai

    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": "tiny-dense", **body})  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert said in caught.value.body["message"]  # type: ignore[index]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-dense"]
    assert client.models.retrieve("tiny-dense").id == "tiny-dense"
