"""Images in OpenAI's chat, from a real server: the answers of `LLM.chat`."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from tests.engine.test_images import PICTURES, llava, save
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


@pytest.mark.full
def test_openais_client_gets_the_offline_answer(tmp_path: Path) -> None:
    import openai
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-dense")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    save(llava(image_token_id=placeholder, vocab_size=len(tokenizer)), tmp_path)
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
        for wrong, message in (
            (str(tmp_path / "picture.png"), "an image URL must be data:image/"),
            ("https://example.com/picture.png", "an image URL must be data:image/"),
            ("data:image/png;base64,AAAA", "are not an image in one of the formats PNG"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(model=str(tmp_path), messages=conversation(wrong), **given)
        many = conversation(*[url_of(PICTURES[0])] * 17)
        with pytest.raises(openai.BadRequestError, match="at most 16 images, got 17"):
            client.chat.completions.create(model=str(tmp_path), messages=many, **given)


def test_a_model_without_images_refuses_them(server: Any) -> None:
    import openai

    client = openai_client(server)
    with pytest.raises(openai.BadRequestError, match="this server takes no images: they need a LLaVA model"):
        client.chat.completions.create(model="tiny-dense", messages=conversation(url_of(PICTURES[0])))
