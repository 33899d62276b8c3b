"""/v1/chat/completions: a conversation to a generation, and its deltas to chunks.

A response that is not streamed is the fold of the same chunks, so the two cannot differ.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from diptych.shared.dialects.parts.choose import NONE, carries_name, reasoning_state, without_reasoning
from diptych.shared.server.api.chat_choice import AnswerForm, ChatChoice, ReasoningCounter
from diptych.shared.server.api.chat_prompt import PROMPT_FIELDS, last_answer, prompt_fields, template_args_of
from diptych.shared.server.api.constraints import constrained
from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.logprob_fields import TokenTexts, chat_entries
from diptych.shared.server.api.long_answers import in_turn
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.api.sampling_fields import StreamOptions
from diptych.shared.server.api.state import HEAD, ServerState
from diptych.shared.server.api.token_fields import FIELDS_OF_PARAMS
from diptych.shared.server.http.errors import ApiError, bad_request, renamed
from diptych.shared.text.tokenizer import Conversation

Chunk = dict[str, Any]


async def start_chat(body: ChatRequest, state: ServerState) -> Generation:
    """Validate everything and make the generation; nothing runs yet."""
    if body.tool_choice is not None and body.tool_choice != "none" and not body.tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    prompts = state.prompts
    prompt, images = await prompts.of_messages(body.messages, tools, template_args_of(body, prompts))
    length_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = getattr(body, length_field)
    if images and body.truncate_prompt_tokens is not None:
        raise bad_request("a prompt with images cannot be cut", "truncate_prompt_tokens")
    room = prompts.ready.context_len - max(wanted or 1, 1)
    prompt = prompt._replace(ids=body.truncated(prompt.ids, room))
    prompts.check(prompt.ids, "messages")
    form = answer_form(body, prompts, prompt)
    body, constraint = constrained(body, form)
    reasoning = {**prompts.reasoning_fields(prompt), **constraint}
    if constraint:
        form = form._replace(constraint="behind_reasoning" if reasoning.get("reasoning_end") else "whole")
    params = body.sampling_params(
        wanted if wanted is not None else prompts.ready.context_len - len(prompt.ids),
        (body.top_logprobs or 0) if body.logprobs else None,
        state.sampling_defaults,
        **reasoning,
    )
    with renamed(FIELDS_OF_PARAMS):
        prompts.check(prompt.ids, "messages", params, length_field)
    params = await prompts.with_words(params)
    return state.generation([prompt.ids], params, body, images, form)


def answer_form(body: ChatRequest, prompts: Prompts, prompt: Conversation) -> AnswerForm:
    """How the answers are read. 400 for a tool whose calls would not be."""
    dialect = prompts.dialect if body.separate_reasoning else without_reasoning(prompts.dialect)
    tools = {}
    if body.tools and body.tool_choice != "none":
        tools = {tool.function.name: tool.function.parameters or True for tool in body.tools}
    for name in tools if NONE not in dialect.tool_parsers else ():
        if not carries_name(type(dialect), name):
            raise bad_request(
                f"the tool name {name!r} cannot be written in this model's form of calls", "tools"
            )
    max_calls = None if body.parallel_tool_calls else 1
    state = reasoning_state(dialect, prompt.ending)
    return AnswerForm(dialect, state, tools, max_calls, prompts.controls, prompts.marker_ids)


async def chat_chunks(body: ChatRequest, generation: Generation, state: ServerState) -> AsyncIterator[Chunk]:
    """Chunks by the rules of the API: per choice a role chunk, deltas and one finish chunk; then usage, if
    the client asked for it."""
    head = state.head_of("chatcmpl", "chat.completion.chunk", body.model)
    texts = TokenTexts(state.prompts.token_bytes, body.return_tokens_as_token_ids)
    form = generation.form
    assert form is not None, "start_chat has made it"
    tokenizer = state.prompts.tokenizer
    choices = [
        ChatChoice(i, body, form, ReasoningCounter(form, tokenizer)) for i in range(len(generation.samples))
    ]

    def chunk(choice: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> Chunk:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [entry], **usage_of_chunk(body.stream_options, generation)}

    is_started = False
    async for deltas in generation.run():
        if not is_started:  # only now is it certain that the engine took the request
            is_started = True
            for choice in choices:
                first = chunk(choice.index, {"role": "assistant", "content": ""})
                if choice.index == 0:
                    given = deltas[0][1].input_logprobs
                    size = generation.num_values(0, len(given))
                    first |= await in_turn(size, prompt_fields, body, generation.prompts[0], texts, given)
                yield first
                if body.echo:
                    yield chunk(choice.index, {"content": last_answer(body)})
        for index, delta in deltas:
            choice = choices[index]
            found = await choice.deltas(delta)
            generation.num_reasoning_tokens = sum(choice.counter.num_tokens for choice in choices)
            entries = None
            if choice.num_top is not None and delta.logprobs:
                entries = {"content": chat_entries(texts, delta.logprobs, choice.num_top)}
                found = found or [{"content": ""}]
            more: dict[str, Any] = {}
            if body.return_token_ids and delta.token_ids:
                found, more = found or [{"content": ""}], {"token_ids": delta.token_ids}
            for i, each in enumerate(found):
                yield chunk(index, each, logprobs=entries if i == 0 else None, **(more if i == 0 else {}))
            if delta.finish is not None:
                matched = delta.finish.matched or delta.finish.token_id
                yield chunk(index, {}, choice.finish_reason(delta.finish), matched_stop=matched)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage_body(generation.usage)}


def fold_chat(chunks: list[Chunk], usage: Usage) -> dict[str, Any]:
    """The response of a request that does not stream."""
    choices: dict[int, dict[str, Any]] = {}
    messages: dict[int, FoldedMessage] = {}
    for chunk in chunks:
        for entry in chunk["choices"]:
            index = entry["index"]
            choice = choices.setdefault(
                index, {"index": index, "message": None, "logprobs": None, "finish_reason": None}
            )
            messages.setdefault(index, FoldedMessage()).add(entry["delta"])
            if "token_ids" in entry:
                choice.setdefault("token_ids", []).extend(entry["token_ids"])
            if entry["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": []}
                choice["logprobs"]["content"] += entry["logprobs"]["content"]
            if entry["finish_reason"] is not None:
                choice["finish_reason"] = entry["finish_reason"]
                if "matched_stop" in entry:
                    choice["matched_stop"] = entry["matched_stop"]
    for index, choice in choices.items():
        choice["message"] = messages[index].body()
    return {
        **{name: chunks[0][name] for name in HEAD},
        "object": "chat.completion",
        **{name: chunks[0][name] for name in PROMPT_FIELDS if name in chunks[0]},
        "choices": [choices[i] for i in sorted(choices)],
        "usage": usage_body(usage),
    }


class FoldedMessage:
    """The message that deltas make. Its texts are joined once, at the end."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []

    def add(self, delta: dict[str, Any]) -> None:
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                self._texts.setdefault(name, []).append(delta[name])
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(self._calls):
                self._calls.append((piece, []))
            self._calls[piece["index"]][1].append(piece["function"]["arguments"])

    def body(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(parts) for name, parts in self._texts.items()}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": first["id"],
                    "type": "function",
                    "function": {"name": first["function"]["name"], "arguments": "".join(parts)},
                }
                for first, parts in self._calls
            ]
        return message


def usage_of_chunk(options: StreamOptions | None, generation: Generation) -> dict[str, Any]:
    """`usage` of a chunk before the last: the counts so far, if the client asked for them; else null, where
    the last chunk will have them."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": usage_body(generation.usage)}
    return {"usage": None} if options is not None and options.include_usage else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` of both endpoints."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
        },
    }


def fresh_seed() -> int:
    """Draw a seed for a request without one."""
    return secrets.randbits(63)


__all__ = [
    "ApiError", "Chunk", "chat_chunks", "fold_chat", "fresh_seed", "start_chat", "usage_body",
    "usage_of_chunk",
]  # fmt: skip
