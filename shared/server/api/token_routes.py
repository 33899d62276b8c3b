"""Tokens and texts, the text of a conversation, and facts about the tokenizer and the model."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from diptych.shared.server.api.chat_prompt import template_args_of
from diptych.shared.server.api.logprob_fields import TokenTexts
from diptych.shared.server.api.long_answers import json_answer, num_values
from diptych.shared.server.api.native_protocol import (
    ApplyTemplateRequest,
    ConversationFields,
    DetokenizeRequest,
    TokenizeRequest,
)
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.errors import ApiError, bad_request


def add_token_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        found: list[Any]
        if body.prompt is not None:
            each = await state.prompts.of_each(body.prompt, "prompt", body.add_special_tokens)
            found = each if isinstance(body.prompt, list) else each[0]
        else:
            found = await _of_messages(body, state)
        return await json_answer(num_values(found), lambda: _tokenized(found, body.return_token_strs, state))

    @app.post("/apply-template")
    async def apply_template(body: ApplyTemplateRequest) -> Response:
        """The prompt as text, with special tokens spelt out."""
        if body.messages is None:
            raise bad_request("messages are missing", "messages")
        ids = await _of_messages(body, state)
        text = await state.prompts.to_text(ids, skip_special_tokens=False)
        return await json_answer(num_values(text), lambda: {"prompt": text})

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        is_several = bool(body.tokens) and isinstance(body.tokens[0], list)
        several: list[Any] = body.tokens if is_several else [body.tokens]
        texts = [await state.prompts.to_text(ids, body.skip_special_tokens) for ids in several]
        text = texts if is_several else texts[0]
        return await json_answer(num_values(texts), lambda: {"prompt": text, "text": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = state.prompts.tokenizer
        if tokenizer is None:
            raise ApiError(404, "this model has no tokenizer")
        eos = getattr(tokenizer.hf_tokenizer, "eos_token", None)
        return {
            "eos_token": eos,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.hf_tokenizer.chat_template,
        }

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": state.model_name,
            "is_generation": not state.ready.num_labels,
            "context_length": state.ready.context_len,
            "vocab_size": state.ready.vocab_size,
            "weight_version": state.client.load.weight_version,
        }


CHAT_FIELDS = tuple(ConversationFields.model_fields)
"""Those of /v1/chat/completions that make the prompt."""


async def _of_messages(body: ConversationFields, state: ServerState) -> list[int]:
    """As /v1/chat/completions makes the prompt."""
    chat = ChatRequest(**{name: getattr(body, name) for name in CHAT_FIELDS})
    tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or ()]
    args = template_args_of(chat, state.prompts)
    prompt, _ = await state.prompts.of_messages(chat.messages, tools or None, args)
    return prompt.ids


def _tokenized(ids: list[Any], with_texts: bool, state: ServerState) -> dict[str, Any]:
    answer = {"tokens": ids, "count": _count(ids), "max_model_len": state.ready.context_len}
    if with_texts:
        texts = TokenTexts(state.prompts.token_bytes, as_ids=False)
        answer["token_strs"] = _map(texts.text_of, ids)
    return answer


def _count(ids: list[Any]) -> Any:
    return [len(each) for each in ids] if ids and isinstance(ids[0], list) else len(ids)


def _map(function: Any, ids: list[Any]) -> list[Any]:
    return [_map(function, each) if isinstance(each, list) else function(each) for each in ids]
