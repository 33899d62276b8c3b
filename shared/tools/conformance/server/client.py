"""A synchronous client of a server with OpenAI's API, for checks."""

from __future__ import annotations

import json
import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from diptych.shared.tools.conformance.server.answer import Answer, Malformed, read_answer

__all__ = ["Answer", "Malformed", "Refused", "Server", "Unreachable"]

T = TypeVar("T")
Prompt = str | Sequence[int]
JSON = dict[str, Any]
LONGEST_CURL = 4000


class Refused(Exception):
    """Any response whose status is not 2xx."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"status {status}: {str(body)[:300]}")
        self.status = status
        self.body = body


class Unreachable(Exception):
    """The server does not answer: no connection, a broken one, or no answer within the timeout."""


def check_url(url: str) -> None:
    """Raises `ValueError` for what is no URL of a server: http://HOST:PORT."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is not the URL of a server: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.host or "%5B" in parts.host:
        raise ValueError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")


@dataclass
class Server:
    """A server's URL and how to call it. `model`: the name for requests; `find_model` finds it if it is
    empty. `token_ids`: token text -> id. `id_params`: the request fields with which this server reports token
    ids; sent with every request for logprobs."""

    url: str
    api_key: str | None = None
    model: str = ""
    timeout: float = 120.0
    token_ids: Mapping[str, int] = field(default_factory=dict)
    id_params: JSON = field(default_factory=dict)
    last: threading.local = field(default_factory=threading.local)  # .request: path and body, of this thread
    ends_at: float = math.inf  # of time.monotonic: no request is sent or waited for after it

    def __post_init__(self) -> None:
        check_url(self.url)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self.url = self.url.rstrip("/").removesuffix("/v1")
        # A new connection for each request: some servers close connections that they announced to keep.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=self.url, headers=headers, timeout=self.timeout, limits=limits, trust_env=False
        )

    def close(self) -> None:
        self.http.close()

    def find_model(self) -> str:
        """The given model, or the first one that the server lists. Raises `ValueError` if there is
        neither."""
        if self.model:
            return self.model
        status, _, body = self.get("/v1/models")
        try:
            assert status == 200
            self.model = str(body["data"][0]["id"])
        except (AssertionError, KeyError, IndexError, TypeError):
            found = f"status {status}: {str(body)[:200]}"
            raise ValueError(f"{self.url}/v1/models lists no model ({found}): give --served-model") from None
        return self.model

    def get(self, path: str) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers, and the body: JSON if it can be parsed, otherwise text."""
        return self._send("GET", path, None)

    def post(self, path: str, body: Any) -> tuple[int, Mapping[str, str], Any]:
        """Post a body; the rest is as in `get`. A body of bytes is sent unchanged."""
        return self._send("POST", path, body)

    def complete(self, prompt: Prompt, **params: Any) -> list[Answer]:
        """/v1/completions: one answer for each of the `n` choices, by index."""
        return self._answers("/v1/completions", self._completion(prompt, params), prompt)

    def stream(self, prompt: Prompt, **params: Any) -> list[Answer]:
        """Complete a prompt with a stream; the chunks of each choice are joined."""
        body = {"stream": True, "stream_options": {"include_usage": True}} | self._completion(prompt, params)
        return self._streamed("/v1/completions", body, prompt)

    def chat(self, messages: Sequence[JSON], stream: bool = False, **params: Any) -> list[Answer]:
        """/v1/chat/completions."""
        body = {"model": self.model, "messages": list(messages), **self._with_ids(params)}
        if stream:
            body = {"stream": True, "stream_options": {"include_usage": True}} | body
            return self._streamed("/v1/chat/completions", body, None)
        return self._answers("/v1/chat/completions", body, None)

    def at_once(self, calls: Sequence[Callable[[], T]], concurrency: int) -> list[T]:
        """The results of the calls, in order, with up to `concurrency` of them in flight. `curl` has none of
        their requests, which are of other threads, and none from before."""
        self.last.request = ("", None)
        with ThreadPoolExecutor(max_workers=max(concurrency, 1)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def curl(self) -> str:
        """A command that repeats this thread's last request; empty: there is none, or it is long."""
        path, body = getattr(self.last, "request", ("", None))
        text = body.decode(errors="replace") if isinstance(body, bytes) else json.dumps(body)
        if not path or len(text) > LONGEST_CURL:
            return ""
        words = ["curl", "-s", self.url + path, "-H", "Content-Type: application/json", "-d", text]
        return shlex.join(words)

    def _completion(self, prompt: Prompt, params: JSON) -> JSON:
        given = prompt if isinstance(prompt, str) else [int(token_id) for token_id in prompt]
        return {"model": self.model, "prompt": given, **self._with_ids(params)}

    def _with_ids(self, params: JSON) -> JSON:
        return self.id_params | params if params.get("logprobs") is not None else params

    def _answers(self, path: str, body: JSON, prompt: Prompt | None) -> list[Answer]:
        status, _, found = self.post(path, body)
        if not 200 <= status < 300:
            raise Refused(status, found)
        if not isinstance(found, dict) or not isinstance(found.get("choices"), list) or not found["choices"]:
            raise Malformed("a response without choices", found)
        return self._read(found["choices"], found, found, body, prompt)

    def _read(
        self, choices: list[JSON], response: JSON, raw: Any, body: JSON, prompt: Prompt | None
    ) -> list[Answer]:
        echo = bool(body.get("echo"))
        num_prompt = 0
        if echo:
            usage = response.get("usage") or {}
            num_prompt = usage.get("prompt_tokens") or 0 if isinstance(prompt, str) else len(prompt or ())
        found = [read_answer(each, response, raw, num_prompt, echo, self.token_ids) for each in choices]
        return sorted(found, key=lambda answer: answer.index)

    def _streamed(self, path: str, body: JSON, prompt: Prompt | None) -> list[Answer]:
        chunks: list[JSON] = []
        self.last.request = path, body
        try:
            with self.http.stream("POST", path, json=body, timeout=self._timeout()) as response:
                if not 200 <= response.status_code < 300:
                    raise Refused(response.status_code, _json_or_text(response.read()))
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    self._timeout()
                    if line.startswith("data:") and data != "[DONE]":
                        chunks.append(json.loads(data))
        except (httpx.TransportError, httpx.StreamError) as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        except ValueError as error:
            raise Malformed(f"a chunk that is no JSON ({error})", data) from None
        choices = join_chunks(chunks)
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
        return self._read(choices, {"usage": usage}, chunks, body, prompt)

    def _timeout(self) -> float:
        """Seconds of a request. Raises `Unreachable` after the end."""
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise Unreachable("the time of the check is over")
        return min(self.timeout, left)

    def _send(self, method: str, path: str, body: Any) -> tuple[int, Mapping[str, str], Any]:
        if method == "POST":
            self.last.request = path, body
        content = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
        try:
            response = self.http.request(method, path, timeout=self._timeout(), **content)
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        return response.status_code, response.headers, _json_or_text(response.content)


def join_chunks(chunks: Sequence[JSON]) -> list[JSON]:
    """Chunks of a stream -> choices as in a response that is not streamed. Raises `Malformed` for an error
    in the stream and for a stream without choices."""
    joined: dict[int, JSON] = {}
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise Malformed("an error in the stream", chunk)
        for choice in chunk.get("choices") or ():
            index = int(choice.get("index") or 0)
            whole = joined.setdefault(
                index, {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            )
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content")
            whole["text"] += text or ""
            whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
            for name in ("token_ids", "prompt_logprobs"):
                if choice.get(name) is not None:
                    whole[name] = whole.get(name, []) + choice[name]
            if choice.get("logprobs"):
                _extend(whole, choice["logprobs"])
    if not joined:
        raise Malformed("a stream without choices", list(chunks)[:3])
    return list(joined.values())


def _extend(whole: JSON, logprobs: JSON) -> None:
    held = whole["logprobs"] = whole["logprobs"] or {}
    for name, values in logprobs.items():
        if isinstance(values, list):
            held[name] = held.get(name, []) + values


def _json_or_text(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
