"""The output of /v1/responses: deltas of a chat answer become items, and each item its events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]


class OutputItems:
    """The items of an answer: reasoning, message or function call. One is open at a time."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: Any = None  # its kind; of a function call, the call's index
        self._texts: list[str] = []  # of the open item: joined once, at its end
        self._held_logprobs: list[dict[str, Any]] = []  # of tokens that may turn out to be a message's text

    def of_delta(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> Iterator[Event]:
        """Events of a chat delta."""
        if text := delta.get("reasoning_content"):
            self._held_logprobs = []
            if self._open != "reasoning":
                item = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": []}
                yield from self._start("reasoning", item, {"type": "reasoning_text", "text": ""})
            self._texts.append(text)
            yield self._event("reasoning_text.delta", content_index=0, delta=text)
        if "content" in delta:
            yield from self._of_content(delta["content"], logprobs["content"] if logprobs is not None else [])
        for call in delta.get("tool_calls", ()):
            self._held_logprobs = []
            function = call["function"]
            if self._open != call["index"]:
                item = {"id": _new_id("fc"), "type": "function_call", "call_id": call["id"]}
                yield from self._start(call["index"], {**item, "name": function["name"], "arguments": ""})
            self._texts.append(function["arguments"])
            if function["arguments"]:
                yield self._event("function_call_arguments.delta", delta=function["arguments"])

    def _of_content(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Return the events of content. Tokens without text, whose text is held back, start no message."""
        logprobs, self._held_logprobs = self._held_logprobs + logprobs, []
        if not text and self._open != "message":
            self._held_logprobs = logprobs
            return
        if not text and not logprobs:
            return
        if self._open != "message":
            item = {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._start("message", item, part)
        self._texts.append(text)
        self._part["logprobs"] += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _event(self, name: str, /, **fields: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        return {"type": f"response.{name}", **place, **fields}

    def _start(self, kind: Any, item: dict[str, Any], part: dict[str, Any] | None = None) -> Iterator[Event]:
        yield from self.close("completed")
        self._open = kind
        self.output.append({**item, "status": "in_progress"})
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output) - 1,
            "item": {**self._item, **({"content": []} if part is not None else {})},
        }
        if part is not None:
            self._item["content"] = [part]
            yield self._event("content_part.added", content_index=0, part={**part})

    def close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item = self._item
        item["status"] = status
        text, self._texts = "".join(self._texts), []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **done)
        else:
            part = self._part
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item}
        self._open = None


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
