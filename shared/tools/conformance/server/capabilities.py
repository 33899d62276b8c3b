"""Probes which features a server offers. A check that needs a missing feature is "not offered", not a
failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.shared.tools.conformance.server.client import Answer, Malformed, Refused, Server, Unreachable

Probed = tuple[Answer | None, str]

HOW_TO_SCORE = (
    "the server reports no log-probabilities. vLLM: leave --max-logprobs at 1 or more. SGLang: send requests "
    "to /v1/completions. llama.cpp: use a build whose /v1/completions answers the field logprobs (2025 or "
    "later). Others: switch on logprobs of /v1/completions or of /v1/chat/completions"
)
ID_PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"return_tokens_as_token_ids": True},
    {"return_token_ids": True},
)
"""Ways to ask for ids of tokens: nothing (llama.cpp), vLLM's and this project's, later vLLM's."""


@dataclass(frozen=True)
class Offers:
    """The features of a server. `reasons`: name of a field that is False or 0 -> the reason, in one line."""

    kind: str = ""  # `owned_by` of the model: vllm, sglang, llamacpp ...
    token_id_prompts: bool = False
    echo_logprobs: bool = False
    prompt_logprobs: bool = False  # vLLM's
    num_top_logprobs: int = 0  # for generated tokens: the largest of 20, 5, 1 that the server accepts
    completion_logprobs: bool = False
    chat: bool = False
    chat_logprobs: bool = False
    generated_ids: bool = False
    stream: bool = False
    seed: bool = False
    n: bool = False
    logit_bias: bool = False
    frequency_penalty: bool = False
    presence_penalty: bool = False
    repetition_penalty: bool = False
    top_k: bool = False
    min_p: bool = False
    ignore_eos: bool = False
    tokenize: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def reason(self, name: str) -> str:
        return self.reasons.get(name, f"{name} is not offered")

    @property
    def scoring(self) -> tuple[str, ...]:
        """The ways to score, the most complete first."""
        ways = {
            "echo": self.echo_logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "generated": self.completion_logprobs,
        }
        return tuple(name for name, is_offered in ways.items() if is_offered)

    def prompt_params(self, num_top: int) -> dict[str, Any]:
        """The request fields, in addition to `logprobs`, that return the prompt's log-probabilities; empty if
        the server scores no prompts."""
        if self.echo_logprobs:
            return {"echo": True}
        return {"prompt_logprobs": max(num_top, 1)} if self.prompt_logprobs else {}


EXTRAS: dict[str, Any] = {
    "seed": 7,
    "n": 2,
    "logit_bias": {"5": 1.0},
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "top_k": 3,
    "min_p": 0.1,
    "ignore_eos": True,
}
"""A value of each parameter; a server that refuses it does not offer it."""


def probe(server: Server, prompt: Sequence[int], text: str) -> Offers:
    """Probe a server. `text` is the text of `prompt`. Sets the fields of the client that are needed to read
    token ids. Raises `ValueError` for a server that refuses a plain request, and the client's error if
    nothing answers."""
    found: dict[str, Any] = {"kind": _kind(server)}
    reasons: dict[str, str] = {}

    def note(name: str, is_offered: bool, why: str) -> bool:
        found[name] = is_offered
        if not is_offered:
            reasons[name] = why
        return is_offered

    base: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
    answer, why = _try(server, prompt, **base)
    asked: str | Sequence[int] = prompt
    if not note("token_id_prompts", answer is not None, f"prompts of token ids: {why}"):
        asked = text
        answer, why = _try(server, text, **base)
    if answer is None:
        raise ValueError(f"{server.url}/v1/completions does not answer a plain request: {why}")
    for number in (20, 5, 1):
        answer, why = _try(server, asked, logprobs=number, **base)
        if answer is not None and answer.logprobs:
            break
    has_logprobs = answer is not None and bool(answer.logprobs)
    note("completion_logprobs", has_logprobs, f"logprobs: {why or 'the answer has none'}")
    if has_logprobs:
        assert answer is not None
        widest = max((len(top) for top in answer.top_logprobs or ()), default=0)
        found["num_top_logprobs"] = min(number, widest)
        _find_ids(server, asked, answer, note, base)
    else:
        with_ids, _ = _try(server, asked, return_token_ids=True, **base)
        if note("generated_ids", with_ids is not None and bool(with_ids.token_ids), "the answer has no ids"):
            server.id_params = {"return_token_ids": True}
    echoed, why = _try(server, asked, logprobs=1, echo=True, **base | {"max_tokens": 1})
    is_echoed = echoed is not None and bool(echoed.prompt_logprobs) and len(echoed.tokens) > 0
    note("echo_logprobs", is_echoed, f"echo with logprobs: {why or 'the answer has no prompt tokens'}")
    answer, why = _try(server, asked, prompt_logprobs=1, **base)
    has_them = answer is not None and bool(answer.prompt_logprobs)
    note("prompt_logprobs", has_them, f"prompt_logprobs: {why or 'the field is ignored'}")
    for name, value in EXTRAS.items():
        answer, why = _try(server, asked, **base | {"temperature": 1.0, name: value})
        note(name, answer is not None, f"{name}: {why}")
    answer, why = _try(server, asked, streamed=True, **base)
    note("stream", answer is not None, f"stream: {why}")
    _probe_chat(server, text, note)
    statuses = [
        server.post("/tokenize", {name: text})[0] for name in ("prompt", "content")
    ]  # llama.cpp: content
    note("tokenize", 200 in statuses, f"/tokenize: status {statuses[0]}")
    return Offers(**found, reasons=reasons)


def _find_ids(
    server: Server, asked: str | Sequence[int], answer: Answer, note: Any, base: dict[str, Any]
) -> None:
    """Sets the first of ID_PARAMS with which the server reports ids, so that no table of texts is needed."""
    table, server.token_ids = server.token_ids, {}
    for params in ID_PARAMS:
        server.id_params = dict(params)
        found, _ = _try(server, asked, logprobs=1, **base)
        if found is not None and found.token_ids is not None:
            note("generated_ids", True, "")
            server.token_ids = table
            return
    server.id_params, server.token_ids = {}, table
    note(
        "generated_ids",
        answer.token_ids is not None,
        "the answer has no ids of tokens",
    )


def _probe_chat(server: Server, text: str, note: Any) -> None:
    messages = [{"role": "user", "content": text}]
    answer, why = _try(server, None, messages=messages, max_tokens=2, temperature=0.0)
    if not note("chat", answer is not None, f"/v1/chat/completions: {why}"):
        return
    params: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
    answer, why = _try(server, None, messages=messages, max_tokens=2, temperature=0.0, **params)
    has_them = answer is not None and bool(answer.logprobs)
    note("chat_logprobs", has_them, f"logprobs of chat: {why or 'the answer has none'}")


def _try(
    server: Server,
    prompt: str | Sequence[int] | None,
    *,
    streamed: bool = False,
    **params: Any,
) -> Probed:
    """The first choice, or the reason why there is none. Raises `Unreachable` for a server that has
    stopped."""
    try:
        if prompt is None:
            return server.chat(**params)[0], ""
        return (server.stream if streamed else server.complete)(prompt, **params)[0], ""
    except (Refused, Malformed) as error:
        return None, str(error)[:200]
    except Unreachable as error:
        server.get("/v1/models")  # raises if the server has stopped
        return None, str(error)[:200]


def _kind(server: Server) -> str:
    _, _, body = server.get("/v1/models")
    try:
        return str(body["data"][0].get("owned_by") or "")
    except (KeyError, IndexError, TypeError, AttributeError):
        return ""
