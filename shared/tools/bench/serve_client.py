"""A client that times the streamed answers of a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import httpx

from diptych.shared.tools.bench.serve_workloads import Conversation, Turn
from diptych.shared.tools.bench.workloads import NUM_RANDOM_IDS

TIMEOUT_SECONDS = 600.0


@dataclass
class Outcome:
    """The outcome of one request at the client. Times are seconds of `time.perf_counter`."""

    start: float
    end: float = 0.0
    chunk_times: list[float] = field(default_factory=list)  # of chunks with output
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    turn: int = 0  # of its conversation

    @property
    def time_to_first_token(self) -> float:
        return self.chunk_times[0] - self.start

    @property
    def inter_token_latencies(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunk_times)]

    @property
    def time_per_output_token(self) -> float | None:
        """Mean over the tokens after the first; None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_output_tokens - 1)

    @property
    def total_time(self) -> float:
        return self.end - self.start


class Client:
    """Sends requests over one pool of connections. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # trust_env: a server under test is not reached through a proxy of the environment
        self.http = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        )
        self.model = ""
        self.fields: dict[str, Any] = {"temperature": temperature, "stream": True}
        self.fields["stream_options"] = {"include_usage": True}
        if ignore_eos:
            self.fields["ignore_eos"] = True

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def connect(self, model: str | None) -> None:
        """Find the model's name: the given one, or the first one that the server lists. Raises
        `ValueError` when the server does not answer."""
        try:
            answer = await self.http.get("/v1/models")
            answer.raise_for_status()
            self.model = model or answer.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise ValueError(f"{self.http.base_url}/v1/models does not answer as expected: {error}") from None

    async def vocab_size(self) -> int:
        """The vocabulary size from /model_info; without it, the usual number of random ids."""
        try:
            size = (await self.http.get("/model_info")).json().get("vocab_size")
        except (httpx.HTTPError, ValueError, AttributeError):
            size = None
        return int(size) if size else NUM_RANDOM_IDS

    async def flush_cache(self) -> bool:
        """Empty the prefix cache. False: the server does not allow it."""
        try:
            answer = await self.http.post("/flush_cache", params={"timeout": 10})
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def run(self, conversation: Conversation) -> AsyncIterator[Outcome]:
        """Run a conversation; one outcome for each turn, up to the first failure."""
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(conversation):
            if isinstance(turn.prompt, str):
                messages.append({"role": "user", "content": turn.prompt})
            outcome = await self.request(turn, messages)
            outcome.turn = number
            yield outcome
            if outcome.error is not None:
                return
            messages.append({"role": "assistant", "content": outcome.text})

    async def request(self, turn: Turn, messages: list[dict[str, str]]) -> Outcome:
        """Send one turn; `messages` ends with its question. A failure is in the outcome, not raised."""
        body = {**self.fields, "model": self.model, "max_tokens": turn.output_len}
        if isinstance(turn.prompt, str):
            path = "/v1/chat/completions"
            body["messages"] = messages
        else:
            path = "/v1/completions"
            body["prompt"] = turn.prompt
        outcome = Outcome(time.perf_counter())
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    outcome.error = f"status {response.status_code}: {text[:200]}"
                else:
                    await self._read(response, outcome)
        except (httpx.HTTPError, ValueError, asyncio.TimeoutError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.end = time.perf_counter()
        if outcome.error is None and not outcome.chunk_times:
            outcome.error = "the stream has no output"
        return outcome

    async def _read(self, response: httpx.Response, outcome: Outcome) -> None:
        held = b""
        async for data in response.aiter_bytes():
            now = time.perf_counter()
            *events, held = (held + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    _take(json.loads(event[6:]), outcome, now)


def _take(chunk: dict[str, Any], outcome: Outcome, now: float) -> None:
    if chunk.get("error"):
        outcome.error = str(chunk["error"].get("message"))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta")
        if delta is None:  # /v1/completions
            outcome.chunk_times.append(now)
            outcome.text += choice["text"]
        elif delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            outcome.chunk_times.append(now)
            outcome.text += delta.get("content") or ""
    usage = chunk.get("usage")
    if usage:
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage["completion_tokens"]
        outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
