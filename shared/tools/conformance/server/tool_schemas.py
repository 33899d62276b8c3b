"""Checks of the schemas of tools: the arguments of a demanded call satisfy each keyword, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Refused
from diptych.shared.tools.conformance.server.conversations import Talk
from diptych.shared.tools.conformance.server.keyword_schemas import KEYWORDS, closed
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.random_schemas import document
from diptych.shared.tools.conformance.server.schemas import HOT, NO_VALIDATOR, has_validator, problem
from diptych.shared.tools.conformance.server.tool_answers import NoCalls, demand
from diptych.shared.tools.conformance.server.tool_choice import asking

JSON = dict[str, Any]


def talk_of(schema: JSON) -> Talk:
    """A request for a call whose argument `value` has this schema. Definitions stay at the root, where
    references look for them."""
    inner = {name: each for name, each in schema.items() if name != "$defs"}
    parameters = {name: schema[name] for name in ("$defs",) if name in schema} | closed(
        ["value"], value=inner
    )
    tool = {"type": "function", "function": {"name": "store", "parameters": parameters, "strict": True}}
    return Talk([{"role": "user", "content": "Store a value."}], [tool], ("store", {}))


def judged(context: Context, name: str, schema: JSON, num: int, seed: int) -> Finding:
    """`num` whole and `num` streamed answers."""
    talk, rng = talk_of(schema), random.Random(f"{name} {seed}")
    parameters = talk.tools[0]["function"]["parameters"]
    num_calls = 0
    for stream in (False, True) if context.offers.stream else (False,):
        for i in range(num):
            fields: JSON = {"temperature": HOT if i or stream else 0.0}
            if context.offers.seed:
                fields["seed"] = rng.randrange(2**31)
            try:
                answer = demand(context, talk, stream, **fields)
            except Refused as error:
                if error.status >= 500:
                    what = f"{name}: neither a call nor a refusal"
                    return Finding("fails", what, 400, error.status, {"schema": parameters})
                return Finding("holds", f"{name} is refused with {error.status}")
            for call in answer.calls if answer.finish_reason != "length" else ():
                num_calls += 1
                if wrong := problem(call.arguments, parameters):
                    how = " in a stream" * stream
                    return Finding("fails", f"{name} is accepted and not satisfied{how}", parameters, wrong)
    if not num_calls:
        return Finding("not offered", f"{name}: no call ended")
    return Finding("holds", f"{name} is satisfied", num_cases=num_calls)


@check(
    "tools.schemas",
    "Each keyword of a tool's schema holds in demanded calls, whole and streamed, or the schema is refused.",
    "A tool runs with arguments that its author has excluded.",
)
def tool_schemas(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    if not has_validator():
        yield Finding("not offered", NO_VALIDATOR)
        return
    try:
        demand(context, asking(context, 1)[0])  # finds how
    except NoCalls as error:
        yield Finding("not offered", str(error))
        return
    first, num = context.rng.randrange(2**31), context.limits.num_schemas
    schemas = dict(KEYWORDS)
    for seed in range(first, first + num // 3):
        schemas[f"random schema {seed}"] = document(random.Random(seed))
    calls = [partial(judged, context, *each, 2 if num < 10 else 3, first) for each in schemas.items()]
    yield from context.server.at_once(calls, context.limits.concurrency)
