"""Checks that invalid requests are refused with a status and an error that clients understand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.same import ask_prompt
from diptych.shared.tools.conformance.server.semantics import CHAT, COMPLETIONS

LONGEST = 300_000
"""Prompts beyond the context are sent for models up to this one."""
BAD_STATUS = "Clients send a request again after a status of 500 or more, and take 200 for an answer."


def refusal(what: str, answer: tuple[int, Any, Any], allowed: tuple[int, ...] = (400, 422)) -> Finding:
    """Check a refusal: one of the statuses, with OpenAI's error object."""
    status, _, body = answer
    if status not in allowed:
        return Finding("fails", f"{what}: status", allowed, status, {"body": str(body)[:300]})
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return Finding("fails", f"{what}: no error.message", {"error": {"message": "..."}}, str(body)[:300])
    return Finding("holds", what, evidence={"status": status, "message": error["message"][:200]})


@check(
    "semantics.wrong_type",
    "A field of the wrong type, or a missing prompt, is refused with an error.",
    BAD_STATUS,
)
def wrong_type(context: Context) -> Iterator[Finding]:
    server = context.server
    base = {"model": server.model, "prompt": ask_prompt(context), "max_tokens": 2}
    for name, value in (("max_tokens", "many"), ("temperature", "hot"), ("prompt", None), ("stop", {"a": 1})):
        body = {**base, name: value}
        if value is None:
            del body[name]
        yield refusal(
            f"{name}: {value!r}" if value is not None else f"no {name}", server.post(COMPLETIONS, body)
        )
    if context.offers.stream:
        body = {**base, "max_tokens": "many", "stream": True}
        yield refusal("max_tokens: 'many' of a stream", server.post(COMPLETIONS, body))
    if context.offers.chat:
        yield refusal("no messages", server.post(CHAT, {"model": server.model, "max_tokens": 2}))


@check("semantics.malformed_json", "A body that is no JSON is refused with an error.", BAD_STATUS)
def malformed_json(context: Context) -> Finding:
    return refusal(
        "a body that ends early", context.server.post(COMPLETIONS, b'{"prompt": '), (400, 415, 422)
    )


@check(
    "semantics.range",
    "A value out of its range is no failure of the server.",
    "The documents have ranges; many servers accept more, which breaks no client.",
)
def out_of_range(context: Context) -> Iterator[Finding]:
    base = {"model": context.server.model, "prompt": ask_prompt(context), "max_tokens": 2}
    for name, value in (
        ("temperature", -1),
        ("top_p", 7),
        ("n", 0),
        ("presence_penalty", 50),
        ("logprobs", -3),
    ):
        status, _, body = context.server.post(COMPLETIONS, {**base, name: value})
        if status >= 500:
            yield Finding("fails", f"{name}: {value}", 400, status, {"body": str(body)[:300]})
        else:
            yield Finding(
                "holds", f"{name}: {value} is " + ("accepted" if status < 300 else f"refused with {status}")
            )


@check(
    "semantics.unknown_model",
    "A model that is not served is refused with 404.",
    "A wrong name goes unnoticed.",
)
def unknown_model(context: Context) -> Finding:
    body = {"model": "no-such-model", "prompt": ask_prompt(context), "max_tokens": 2}
    answer = context.server.post(COMPLETIONS, body)
    if 200 <= answer[0] < 300:
        return Finding("holds", "any model name is accepted: the server has one model")
    return refusal("an unknown model", answer, (404, 400))


@check(
    "semantics.context", "A prompt longer than the context is refused, not cut and not a failure.", BAD_STATUS
)
def too_long(context: Context) -> Finding:
    length = context.oracle.context_len
    if length > LONGEST:
        return Finding("not offered", f"a context of {length} tokens is too long to try")
    ids = list(context.prompts[0])
    prompt: Any = (ids * (length // len(ids) + 2))[: length + 8]
    if not context.offers.token_id_prompts:
        prompt = context.oracle.tokenizer.decode(prompt)
    body = {"model": context.server.model, "prompt": prompt, "max_tokens": 2}
    return refusal(
        f"a prompt of {length + 8} tokens", context.server.post(COMPLETIONS, body), (400, 413, 422)
    )


@check(
    "semantics.unknown_path", "A path that does not exist gives 404.", "Clients probe for optional routes."
)
def unknown_path(context: Context) -> Finding:
    status, _, body = context.server.post("/v1/no-such-route", {})
    return Finding(
        "holds" if status in (404, 405) else "fails",
        "an unknown path",
        404,
        status,
        {"body": str(body)[:200]},
    )


@check(
    "semantics.after_errors",
    "A request after refused ones gets its answer.",
    "One bad request must not end a server.",
)
def after_errors(context: Context) -> Finding:
    for body in (b"{", b"[]", b'{"prompt": {}}'):
        context.server.post(COMPLETIONS, body)
    answer = context.server.complete(ask_prompt(context), max_tokens=2, temperature=0)[0]
    return Finding("holds", "an answer after refused requests", actual=answer.text)
