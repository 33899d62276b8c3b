"""Long answers give other requests their turn, and cost time in proportion to their length."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from diptych.shared.dialects.hermes import Hermes
from diptych.shared.server.api.chat import FoldedMessage
from diptych.shared.server.api.chat_choice import AnswerForm, ChatChoice, ReasoningCounter
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.api.response_items import OutputItems
from diptych.shared.server.engine.engine_client import Delta
from diptych.shared.server.engine.messages import Finish

ARGUMENTS = {"words": ["a quick brown fox"] * 20_000}
CALL = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'


def choice_of() -> ChatChoice:
    body = ChatRequest(messages=[{"role": "user", "content": "a"}])
    form = AnswerForm(Hermes(), "may_open", {"f": True}, None, {}, {})
    return ChatChoice(0, body, form, ReasoningCounter(form, None))


def test_a_long_text_is_read_in_parts_between_which_others_run() -> None:
    async def answer() -> tuple[list[dict[str, Any]], int]:
        task = asyncio.ensure_future(choice_of().deltas(Delta(text=CALL, finish=Finish(kind="stop"))))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        return task.result(), num_turns

    deltas, num_turns = asyncio.run(answer())
    assert num_turns >= len(CALL) // 1024
    message = FoldedMessage()
    for delta in deltas:
        message.add(delta)
    (call,) = message.body()["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


@pytest.mark.parametrize("make", [FoldedMessage, OutputItems])
def test_many_pieces_are_joined_once(make: type) -> None:
    """Appending to a text would copy 25 GB here."""
    collected, start = make(), time.thread_time()
    first = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    pieces = [first] + [{"index": 0, "function": {"arguments": "abcde"}}] * 100_000
    for piece in pieces:
        delta = {"tool_calls": [piece]}
        collected.add(delta) if make is FoldedMessage else list(collected.of_delta(delta, None))
    if make is OutputItems:
        list(collected.close("completed"))
        assert len(collected.output[0]["arguments"]) == 500_000
    else:
        assert len(collected.body()["tool_calls"][0]["function"]["arguments"]) == 500_000
    assert time.thread_time() - start < 3
