"""/v1/chat/completions: a conversation to a generation, and its deltas to chunks.

A response that is not streamed is the fold of the same chunks, so the two cannot differ.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from diptych.shared.grammar.spec import tool_call_tag
from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.logprob_fields import TokenTexts, chat_entries
from diptych.shared.server.api.parsers import THINK_END, THINK_START, ReasoningParser, ToolParser
from diptych.shared.server.api.protocol import ChatRequest, StreamOptions, ToolChoice
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.engine.engine_client import Delta
from diptych.shared.server.engine.messages import Finish
from diptych.shared.server.http.errors import ApiError, bad_request

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
    template_args = dict(body.chat_template_kwargs or {})
    state.prompts.check_template_args(template_args)
    if body.reasoning_effort is not None:
        template_args.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = await state.prompts.of_messages(body.messages, tools, template_args)
    images = await state.prompts.of_images(body.messages)
    state.prompts.check(prompt, "messages")
    length_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = getattr(body, length_field)
    max_new_tokens = wanted if wanted is not None else state.prompts.ready.context_len - len(prompt)
    params = body.sampling_params(
        max_new_tokens,
        (body.top_logprobs or 0) if body.logprobs else None,
        reasoning_first=True,
        **_tool_grammar(body),
    )
    state.prompts.check(prompt, "messages", params, length_field)
    return state.generation([prompt], params, body, images)


def _tool_grammar(body: ChatRequest) -> dict[str, Any]:
    """The constraint of tool_choice "required", or of one that names a tool."""
    tools = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in tools:
            raise bad_request(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
        return {"structural_tag": tool_call_tag([(name, tools[name])], is_parallel=False)}
    if choice == "required":
        return {"structural_tag": tool_call_tag(list(tools.items()), body.parallel_tool_calls)}
    return {}


class ChatChoice:
    """The parsers of one choice, and what it has given so far."""

    def __init__(self, index: int, body: ChatRequest, starts_thinking: bool, texts: TokenTexts) -> None:
        self.index = index
        self.texts = texts
        self.num_top = (body.top_logprobs or 0) if body.logprobs else None
        self.reasoning = ReasoningParser(starts_thinking) if body.separate_reasoning else None
        self.tools: ToolParser | None = None
        if body.tools and body.tool_choice != "none":
            self.tools = ToolParser(max_calls=None if body.parallel_tool_calls else 1)
        self.is_thinking = starts_thinking
        self.num_reasoning_tokens = 0

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """The `delta` objects of a piece, and what the parsers held back when it is the last."""
        self._count_reasoning(delta.token_ids)
        pieces = [("content", delta.text)] if delta.text else []
        if self.reasoning is not None:
            pieces = list(self.reasoning.feed(delta.text))
            if delta.finish is not None:
                pieces += self.reasoning.finish()
        found: list[dict[str, Any]] = []
        for kind, text in pieces:
            if kind == "reasoning":
                found.append({"reasoning_content": text, "reasoning": text})
            else:
                found += self._content(text)
        if delta.finish is not None and self.tools is not None:
            found += self._tool_deltas(*self.tools.finish())
        return found

    def _count_reasoning(self, token_ids: list[int]) -> None:
        """Tokens up to the one that ends the reasoning, where that is one token."""
        for token_id in token_ids:
            text = self.texts.bytes_of(token_id).decode("utf-8", errors="replace")
            self.is_thinking = self.is_thinking or text == THINK_START
            self.num_reasoning_tokens += self.is_thinking
            if text == THINK_END:
                self.is_thinking = False

    def _content(self, text: str) -> list[dict[str, Any]]:
        if self.tools is None:
            return [{"content": text}]
        return self._tool_deltas(*self.tools.feed(text))

    def _tool_deltas(self, content: str, calls: list[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"content": content}] if content else []
        for call in calls:
            entry: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is not None:
                entry = {
                    "index": call.index,
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            found.append({"tool_calls": [entry]})
        return found

    def finish_reason(self, finish: Finish) -> str:
        if finish.kind == "stop" and self.tools is not None and self.tools.num_calls:
            return "tool_calls"
        return finish.kind


async def chat_chunks(body: ChatRequest, generation: Generation, state: ServerState) -> AsyncIterator[Chunk]:
    """Chunks by the rules of the API: per choice a role chunk, deltas and one finish chunk; then usage, if
    the client asked for it."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.model or state.model_name,
    }
    texts = TokenTexts(state.prompts.token_bytes, body.return_tokens_as_token_ids)
    starts_thinking = _ends_inside_thinking(state.prompts, generation.prompts[0])
    choices = [ChatChoice(i, body, starts_thinking, texts) for i in range(len(generation.samples))]

    def chunk(choice: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> Chunk:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [entry], **usage_of_chunk(body.stream_options, generation)}

    is_started = False
    async for deltas in generation.run():
        if not is_started:  # only now is it certain that the engine took the request
            is_started = True
            for choice in choices:
                yield chunk(choice.index, {"role": "assistant", "content": ""})
        for index, delta in deltas:
            choice = choices[index]
            found = choice.deltas(delta)
            generation.num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
            entries = None
            if choice.num_top is not None and delta.logprobs:
                entries = {"content": chat_entries(texts, delta.logprobs, choice.num_top)}
                found = found or [{"content": ""}]
            for i, each in enumerate(found):
                yield chunk(index, each, logprobs=entries if i == 0 else None)
            if delta.finish is not None:
                matched = delta.finish.matched or delta.finish.token_id
                more = {"matched_stop": matched} if delta.finish.kind == "stop" else {}
                yield chunk(index, {}, choice.finish_reason(delta.finish), **more)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage_body(generation.usage)}


def fold_chat(chunks: list[Chunk], usage: Usage) -> dict[str, Any]:
    """The response of a request that does not stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for entry in chunk["choices"]:
            choice = choices.setdefault(
                entry["index"],
                {
                    "index": entry["index"],
                    "message": {"role": "assistant", "content": None},
                    "logprobs": None,
                    "finish_reason": None,
                },
            )
            _fold_delta(choice["message"], entry["delta"])
            if entry["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": []}
                choice["logprobs"]["content"] += entry["logprobs"]["content"]
            if entry["finish_reason"] is not None:
                choice["finish_reason"] = entry["finish_reason"]
                if "matched_stop" in entry:
                    choice["matched_stop"] = entry["matched_stop"]
    for choice in choices.values():
        message = choice["message"]
        if message["content"] == "" and message.get("tool_calls"):
            message["content"] = None
    head = {name: chunks[0][name] for name in ("id", "created", "model")}
    return {
        **head,
        "object": "chat.completion",
        "choices": [choices[i] for i in sorted(choices)],
        "usage": usage_body(usage),
    }


def _fold_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content", "reasoning"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        function = calls[piece["index"]]["function"]
        function["name"] += piece["function"].get("name", "")
        function["arguments"] += piece["function"]["arguments"]


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


def _ends_inside_thinking(prompts: Prompts, prompt: list[int]) -> bool:
    """Whether the chat template has opened the reasoning already."""
    if prompts.tokenizer is None:
        return False
    tail = prompts.tokenizer.decode(prompt[-16:])
    return THINK_START in tail and THINK_END not in tail.rpartition(THINK_START)[2]


__all__ = [
    "ApiError", "Chunk", "chat_chunks", "fold_chat", "fresh_seed", "start_chat", "usage_body",
    "usage_of_chunk",
]  # fmt: skip
