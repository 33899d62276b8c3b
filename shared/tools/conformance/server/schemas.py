"""Checks of JSON Schema: an answer satisfies the schema of its request, or the server refuses the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Malformed, Refused
from diptych.shared.tools.conformance.server.keyword_schemas import KEYWORDS
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.random_schemas import document, has_meaning
from diptych.shared.tools.conformance.server.semantics import CHAT, MESSAGES, post

JSON = dict[str, Any]
NO_VALIDATOR = "it needs the package jsonschema: pip install 'diptych[check]'"
HOT = 1.7
"""Temperature of the answers: a keyword that is ignored is violated soon."""


@cache
def has_validator() -> bool:
    return find_spec("jsonschema") is not None


def problem(text: str, schema: Any) -> str:
    """Why a text does not satisfy a schema; empty: it does, or without jsonschema it is JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON ({error}): {text[:200]!r}"
    if not has_validator():
        return ""
    import jsonschema

    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    found = sorted(validator.iter_errors(value), key=str)
    return f"{found[0].message[:200]} in {text[:200]}" if found else ""


def answer_to(context: Context, schema: Any, temperature: float, seed: int) -> str | None:
    """The text of an answer; None: it was cut. Raises `Refused`."""
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    fields: JSON = {"temperature": temperature, "max_tokens": 120, "response_format": shape}
    if context.offers.seed:
        fields["seed"] = seed
    if (switch := context.oracle.chat.thinking_switch) and context.oracle.chat.dialect.reasoning:
        fields["chat_template_kwargs"] = {switch: False}
    choice = post(context, CHAT, messages=MESSAGES, **fields)["choices"][0]
    if choice.get("finish_reason") == "length":
        return None
    return (choice.get("message") or {}).get("content") or ""


def judged(
    context: Context, name: str, schema: Any, num: int, seed: int, has_meaning: bool = True
) -> Finding:
    """Several answers to one schema. `seed`: of the run; each answer has its own. One without a meaning has
    to be refused, or answered anyhow."""
    num_ended, rng = 0, random.Random(f"{name} {seed}")
    for i in range(num):
        try:
            text = answer_to(context, schema, 0.0 if i == 0 else HOT, rng.randrange(2**31))
        except Refused as error:
            if error.status >= 500:
                what = f"{name}: neither an answer nor a refusal"
                return Finding("fails", what, 400, error.status, {"schema": schema})
            return Finding("holds", f"{name} is refused with {error.status}")
        if text is None:
            continue
        num_ended += 1
        if has_meaning and (wrong := problem(text, schema)):
            return Finding("fails", f"{name} is accepted and not satisfied", schema, wrong)
    if not num_ended:
        return Finding("not offered", f"{name}: no answer ended")
    return Finding("holds", f"{name} is satisfied", num_cases=num_ended)


def no_formats(context: Context) -> Finding | None:
    """A finding if the server takes no response_format, or nothing can validate the answers."""
    if (missing := no_chat(context)) is not None:
        return missing
    if not has_validator():
        return Finding("not offered", NO_VALIDATOR)
    try:
        answer_to(context, KEYWORDS["type"], 0.0, 0)
    except Refused as error:
        if error.status >= 500:
            raise
        return Finding("not offered", f"response_format json_schema: {error}")
    return None


@check(
    "schema.keywords",
    "Each keyword of JSON Schema is satisfied, or the schema is refused.",
    "A keyword that is ignored gives data that the application has excluded.",
)
def keywords(context: Context) -> Iterator[Finding]:
    if (missing := no_formats(context)) is not None:
        yield missing
        return
    num = 6 if context.limits.num_schemas < 10 else 8
    seed = context.rng.randrange(2**31)
    calls = [partial(judged, context, *each, num, seed) for each in KEYWORDS.items()]
    yield from context.server.at_once(calls, context.limits.concurrency)


@check(
    "schema.random",
    "Random schemas are satisfied or refused.",
    "Keywords that hold alone are ignored in combination.",
)
def random_schemas(context: Context) -> Iterator[Finding]:
    if (missing := no_formats(context)) is not None:
        yield missing
        return
    first = context.rng.randrange(2**31)
    for seed in range(first, first + context.limits.num_schemas):
        found = document(random.Random(seed))
        try:
            yield judged(context, f"random schema {seed}", found, 2, first, has_meaning(found))
        except Malformed as error:
            yield Finding("fails", f"random schema {seed}: {error}")
