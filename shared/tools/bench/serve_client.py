"""A client that times the streamed answers of a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from types import TracebackType
from typing import Any

import httpx
import msgspec

from diptych.shared.tools.bench.serve_workloads import Conversation, Turn
from diptych.shared.tools.bench.workloads import NUM_RANDOM_IDS

TIMEOUT_SECONDS = 600.0
JSON = {"Content-Type": "application/json"}


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
    token_ids: list[int] = field(default_factory=list)  # of the answer, where the server returns them
    history_len: int = 0  # tokens of the prompt that the turns before have computed, if it is token ids

    @property
    def time_to_first_token(self) -> float:
        return self.chunk_times[0] - self.start

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
        """Run a conversation; one outcome for each turn, up to the first failure. Behind a prompt of token
        ids come those of its answer. If the server does not return them, as many others take their place,
        and only the prompt before is a prefix."""
        messages: list[dict[str, str]] = []
        prompt: list[int] = []
        history_len = 0
        for number, turn in enumerate(conversation):
            await asyncio.sleep(turn.think_time)
            history: list[dict[str, str]] | list[int] = messages
            if isinstance(turn.prompt, str):
                messages.append({"role": "user", "content": turn.prompt})
            else:
                prompt += turn.prompt
                history = prompt
            outcome = await self.request(turn, history, with_token_ids=len(conversation) > 1)
            outcome.turn, outcome.history_len = number, history_len
            yield outcome
            if outcome.error is not None:
                return
            messages.append({"role": "assistant", "content": outcome.text})
            if not isinstance(turn.prompt, str):
                num_tokens, answer = outcome.num_output_tokens, outcome.token_ids
                is_known = len(answer) == num_tokens
                history_len = len(prompt) + (num_tokens - 1 if is_known else 0)  # the last is not computed
                prompt += answer if is_known else islice(cycle(turn.prompt), num_tokens)

    async def request(
        self, turn: Turn, history: list[dict[str, str]] | list[int], with_token_ids: bool = False
    ) -> Outcome:
        """Send one turn; `history` ends with its prompt. A failure is in the outcome, not raised."""
        path, name = "/v1/completions", "prompt"
        if isinstance(turn.prompt, str):
            path, name = "/v1/chat/completions", "messages"
        body = {**self.fields, "model": self.model, "max_tokens": turn.output_len, name: history}
        if with_token_ids and name == "prompt":
            body["return_token_ids"] = True
        data = msgspec.json.encode(body)  # before the clock starts: 50,000 ids take milliseconds
        outcome = Outcome(time.perf_counter())
        try:
            async with self.http.stream("POST", path, content=data, headers=JSON) as response:
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
                    _take(msgspec.json.decode(event[6:]), outcome, now)


def _take(chunk: dict[str, Any], outcome: Outcome, now: float) -> None:
    if chunk.get("error"):
        outcome.error = str(chunk["error"].get("message"))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta")
        if delta is None:  # /v1/completions
            outcome.chunk_times.append(now)
            outcome.text += choice["text"]
            outcome.token_ids += choice.get("token_ids") or ()
        elif delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            outcome.chunk_times.append(now)
            outcome.text += delta.get("content") or ""
    usage = chunk.get("usage")
    if usage:
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage["completion_tokens"]
        outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
