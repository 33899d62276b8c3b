"""Images in OpenAI's chat, from a real server: the answers of `LLM.chat`."""

from __future__ import annotations

import base64
import contextlib
import socket
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests.images import bytes_of_data_url
from diptych.shared.loading.model_path import ASSETS
from tests.engine.test_images import PICTURES, llava, processor, save
from tests.engine.test_qwen_images import PROCESSOR, qwen3_vl
from tests.server.running import openai_client, serving

TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}{% endfor %}"""


def url_of(picture: Any, form: str = "PNG") -> str:
    file = BytesIO()
    picture.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def conversation(*urls: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is 12 + 30?"}]}]


def of_anthropic(conversation: list[Any]) -> dict[str, Any]:
    blocks = []
    for part in conversation[0]["content"]:
        if part["type"] == "image_url":
            data = part["image_url"]["url"].partition("base64,")[2]
            part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        blocks.append(part)
    return {"messages": [{"role": "user", "content": blocks}]}


@contextlib.contextmanager
def unreached() -> Iterator[str]:
    """A URL on this computer to which nothing may have connected at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/picture.png"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_of", "preparation"), [(llava, processor()), (qwen3_vl, PROCESSOR)], ids=["llava", "qwen3-vl"]
)
def test_openais_client_gets_the_offline_answer(tmp_path: Path, model_of: Any, preparation: Any) -> None:
    import openai
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-dense")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    save(model_of(image_token_id=placeholder, vocab_size=len(tokenizer)), tmp_path, preparation)
    tokenizer.save_pretrained(tmp_path)
    given = {"temperature": 0, "max_tokens": 6, "logit_bias": {placeholder: -100}}
    llm = LLM(str(tmp_path), panel="reference", device="cpu", max_total_tokens=256)
    messages = [conversation(url_of(PICTURES[0])), conversation(*map(url_of, PICTURES[1:]))]
    offline = [llm.chat(each, **{**given, "logit_bias": {placeholder: float("-inf")}}) for each in messages]
    assert offline[0].text != offline[1].text
    with serving("--model", str(tmp_path), "--panel", "reference", "--max-total-tokens", "256") as server:
        client = openai_client(server)
        for _ in range(2):
            for each, expected in zip(messages, offline):
                answer = client.chat.completions.create(model=str(tmp_path), messages=each, **given)
                assert answer.choices[0].message.content == expected.text
                assert answer.usage.prompt_tokens == expected.num_prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens == expected.num_prompt_tokens - 1
        for each, expected in zip(messages, offline):
            counted = httpx.post(
                f"{server.url}/v1/messages/count_tokens", json=of_anthropic(each), timeout=60
            )
            assert counted.json() == {"input_tokens": expected.num_prompt_tokens}
            body = {**of_anthropic(each), "max_tokens": 1, "temperature": 0}
            usage = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()["usage"]
            assert usage["cache_read_input_tokens"] == expected.num_prompt_tokens - 1
        for wrong, message in (
            (str(tmp_path / "picture.png"), "an image URL must be data:image/"),
            ("https://example.com/picture.png", "an image URL must be data:image/"),
            ("data:image/png;base64,AAAA", "are not an image in one of the formats PNG"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(model=str(tmp_path), messages=conversation(wrong), **given)
        with (
            unreached() as url,
            pytest.raises(openai.BadRequestError, match="an image URL must be data:image/"),
        ):
            client.chat.completions.create(model=str(tmp_path), messages=conversation(url), **given)
        many = conversation(*[url_of(PICTURES[0])] * 17)
        with pytest.raises(openai.BadRequestError, match="at most 16 images, got 17"):
            client.chat.completions.create(model=str(tmp_path), messages=many, **given)


def test_a_model_without_images_refuses_them(server: Any) -> None:
    import openai

    client = openai_client(server)
    with pytest.raises(openai.BadRequestError, match="Qwen3ForCausalLM takes no images: they need"):
        client.chat.completions.create(model="tiny-dense", messages=conversation(url_of(PICTURES[0])))


@pytest.mark.parametrize(
    "form", ["{url}", "file:///etc/hosts", "//{url}", "data:{url}", "{url}#data:image/png;base64,"]
)
def test_no_url_is_fetched(form: str) -> None:
    with unreached() as url, pytest.raises(ValueError, match="an image URL must be data:image/"):
        bytes_of_data_url(form.format(url=url))


def user(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


ROUTES: dict[str, tuple[str, Any]] = {
    "chat": (
        "chat/completions",
        lambda url: {"messages": user({"type": "image_url", "image_url": {"url": url}})},
    ),
    "responses, image": ("responses", lambda url: {"input": user({"type": "input_image", "image_url": url})}),
    "responses, file": ("responses", lambda url: {"input": user({"type": "input_file", "file_url": url})}),
    "responses, screenshot": (
        "responses",
        lambda url: {
            "input": [
                {
                    "type": "computer_call_output",
                    "call_id": "c",
                    "output": {"type": "computer_screenshot", "image_url": url},
                }
            ]
        },
    ),
    "responses, server of tools": (
        "responses",
        lambda url: {"input": "Hi", "tools": [{"type": "mcp", "server_label": "s", "server_url": url}]},
    ),
    "messages, image": (
        "messages",
        lambda url: {"messages": user({"type": "image", "source": {"type": "url", "url": url}})},
    ),
    "messages, document": (
        "messages",
        lambda url: {"messages": user({"type": "document", "source": {"type": "url", "url": url}})},
    ),
    "messages, server of tools": (
        "messages",
        lambda url: {
            "messages": [{"role": "user", "content": "Hi"}],
            "mcp_servers": [{"type": "url", "url": url, "name": "s"}],
        },
    ),
}


@pytest.mark.parametrize("case", ROUTES)
def test_no_dialect_fetches_what_a_body_names(case: str, server: Any) -> None:
    path, body = ROUTES[case]
    with unreached() as url:
        whole = {"model": "tiny-dense", "max_tokens": 4, **body(url)}
        if path == "responses":
            whole["max_output_tokens"] = whole.pop("max_tokens")
        answer = httpx.post(f"{server.url}/v1/{path}", json=whole, timeout=60)
        assert answer.status_code == 400, answer.text
