"""Chat chunks of a known answer, for the translations of the chat API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from diptych.shared.server.api.generation import Usage
from diptych.shared.types import SamplingParams

Event = dict[str, Any]


class FakeGeneration:
    """What a translation reads of a generation."""

    params = SamplingParams()
    usage = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4, reasoning_tokens=2)


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> Event:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
    return {"id": "c", "created": 1, "model": "m", "choices": [choice]}


def call(index: int, arguments: str, name: str | None = None) -> Event:
    entry: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name is not None:
        entry |= {"id": f"call_{index}", "type": "function"}
        entry["function"]["name"] = name
    return chunk({"tool_calls": [entry]})


ANSWER_WITH_TOOLS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "Hm", "reasoning": "Hm"}),
    chunk({"reasoning_content": ".", "reasoning": "."}),
    chunk({"content": "Let me "}),
    chunk({"content": "see."}),
    call(0, "", "add"),
    call(0, '{"a": 1,'),
    call(0, ' "b": "ü"}'),
    call(1, "", "now"),
    call(1, "{}"),
    chunk({}, "tool_calls", matched_stop=3),
]
"""Reasoning, text and two calls."""


async def _source(chunks: list[Event]) -> AsyncIterator[Event]:
    for each in chunks:
        yield each


def translated(
    chunks: list[Event], translate: Callable[[AsyncIterator[Event]], AsyncIterator[Event]]
) -> list[Event]:
    """The events of these chunks."""

    async def collect() -> list[Event]:
        return [event async for event in translate(_source(chunks))]

    return asyncio.run(collect())
