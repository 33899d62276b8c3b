"""A proxy in front of a server's application that plants one fault in the requests or the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from diptych.shared.text.tokenizer import Tokenizer

PATHS = ("/v1/completions", "/v1/chat/completions")
Body = dict[str, Any]
Ask = Callable[[Body], Awaitable["Reply"]]
Play = Callable[[Body, Ask, "FaultyProxy"], Awaitable["Reply"]]


@dataclass
class Reply:
    """One answer of the server. `chunks`: the JSON of each event of a stream, or the one JSON of another
    answer. `has_done`: the stream ends with [DONE]. `pause`: seconds before an event, by its number."""

    status: int
    is_stream: bool
    chunks: list[Body] = field(default_factory=list)
    has_done: bool = True
    pause: Callable[[int], float] | None = None

    @property
    def choices(self) -> list[Body]:
        """The entries of `choices` of all chunks, in order; none of an error."""
        return [choice for chunk in self.chunks for choice in chunk.get("choices") or []]

    @property
    def content_type(self) -> bytes:
        return b"text/event-stream" if self.is_stream else b"application/json"

    def encode(self) -> bytes:
        if not self.is_stream:
            return json.dumps(self.chunks[0]).encode()
        done = "data: [DONE]\n\n" * self.has_done
        return ("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks) + done).encode()

    @classmethod
    def decode(cls, status: int, content_type: str, data: bytes) -> Reply:
        if not content_type.startswith("text/event-stream"):
            return cls(status, False, [json.loads(data)])
        events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
        return cls(status, True, [json.loads(event) for event in events if event != "[DONE]"])


class FaultyProxy:
    """An ASGI application around `app`. Without a fault it passes everything on. A fault gets the body of a
    request, a function that asks the server, and the proxy. What it returns is the answer."""

    def __init__(self, app: Callable[..., Any], tokenizer: Tokenizer) -> None:
        self.app = app
        self.tokenizer = tokenizer
        self.fault: Play | None = None
        self.num_in_flight = 0
        self.seen: list[list[int]] = []  # prompts since the fault was planted

    def plant(self, fault: Play | None) -> None:
        self.fault, self.seen = fault, []

    def prompts(self, body: Body) -> list[list[int]]:
        """The token ids of the prompts of a completion request."""
        prompt = body.get("prompt", [])
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [self.tokenizer.encode(each) if isinstance(each, str) else each for each in prompt]

    def has_cached(self, body: Body, length: int) -> bool:
        """Whether an earlier request had a prompt with the first `length` tokens of one of these."""
        prompts = [prompt for prompt in self.prompts(body) if len(prompt) >= length]
        is_cached = any(prompt[:length] == seen[:length] for prompt in prompts for seen in self.seen)
        self.seen += prompts
        return is_cached

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.fault is None or scope["type"] != "http" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if isinstance(body, dict):
            self.num_in_flight += 1
            try:
                reply = await self.fault(body, lambda changed: self._ask(scope, changed), self)
                await self._send(reply, send)
            finally:
                self.num_in_flight -= 1
        else:
            await self._send(await self._ask(scope, data), send)

    async def _send(self, reply: Reply, send: Any) -> None:
        headers = [(b"content-type", reply.content_type)]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        data = reply.encode()
        if reply.pause is not None:
            events = data.split(b"\n\n")
            for i, event in enumerate(events[:-1]):
                await asyncio.sleep(reply.pause(i))
                part = {"type": "http.response.body", "body": event + b"\n\n", "more_body": True}
                await send(part)
            data = events[-1]
        await send({"type": "http.response.body", "body": data})

    async def _ask(self, scope: dict[str, Any], body: Body | bytes) -> Reply:
        """The server's answer to a body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        parts: list[dict[str, Any]] = []
        requests = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            parts.append(message)

        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(data)).encode()))
        await self.app({**scope, "headers": headers}, receive, send)
        kind = dict(parts[0]["headers"]).get(b"content-type", b"").decode()
        return Reply.decode(parts[0]["status"], kind, b"".join(part.get("body", b"") for part in parts[1:]))
