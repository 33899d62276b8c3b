"""Checks of what a server makes of the model's calls: against the schemas, and against the reference's own
answer as the model's dialect reads it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from diptych.shared.tools.conformance.server.chat_oracle import Read
from diptych.shared.tools.conformance.server.checks import Context, Finding, Status, check
from diptych.shared.tools.conformance.server.client import Refused
from diptych.shared.tools.conformance.server.conversations import Talk, talks
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.schemas import NO_VALIDATOR, has_validator, problem
from diptych.shared.tools.conformance.server.semantics import compared
from diptych.shared.tools.conformance.server.tool_answers import NoCalls, ToolAnswer, ask, demand
from diptych.shared.tools.conformance.server.tool_choice import asking

JSON = dict[str, Any]
AWKWARD: dict[str, Any] = {
    "a number as text": "123",
    "null": None,
    "null as text": "null",
    "true as text": "True",
    "an empty text": "",
    "nested": {"a": [1, {"b": None}], "c": {}},
    "an empty object": {},
    "an end of a tag": "</parameter>\n</tool_call>",
    "quotes": 'say "no" \\ and \n go',
    "a float": 0.5,
    "characters": "é 🙂 <&>",
}
MAX_TOKENS = 120
NUM_STREAMED = 16


@check(
    "tools.arguments",
    "Arguments of demanded calls are JSON that satisfies the tool's schema, whole and streamed.",
    "K2's vendor verifier calls the share schema accuracy; the official API has 100 %.",
)
def arguments(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    if not has_validator():
        yield Finding("not offered", NO_VALIDATOR)
        return
    found = asking(context, max(context.limits.num_talks // 2, 3))
    try:
        demand(context, found[0])  # finds how
    except NoCalls as error:
        yield Finding("not offered", str(error))
        return
    streams = (False, True) if context.offers.stream else (False,)
    asks = [partial(demand, context, talk, stream, temperature=1.0) for talk in found for stream in streams]
    answers = context.server.at_once(asks, context.limits.concurrency)
    valid, made, first = 0, 0, ""
    for i, answer in enumerate(answers):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in found[i // len(streams)].tools}
        if answer.finish_reason == "length":
            continue
        for call in answer.calls:
            wrong = problem(call.arguments, schemas.get(call.name, False))
            made, valid, first = made + 1, valid + (not wrong), first or wrong
    evidence = {"schema accuracy": valid / made if made else None, "calls": made}
    if not made:
        yield Finding("not offered", "no complete call", evidence=evidence)
    elif valid < made:
        yield Finding("fails", f"{made - valid} of {made} calls violate their schema", None, first, evidence)
    else:
        yield Finding("holds", f"{made} calls satisfy their schemas", evidence=evidence, num_cases=made)


@check(
    "tools.types",
    'Values keep their type: "123" is a text, null is null, and tags in texts end nothing.',
    "Parsers of calls in XML or Python guess types; a house number becomes an integer.",
)
def types(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for name, value in AWKWARD.items():
        schema = {
            "type": "object",
            "properties": {"x": {"const": value}},
            "required": ["x"],
            "additionalProperties": False,
        }
        tool = {"type": "function", "function": {"name": "store", "parameters": schema}}
        talk = Talk([{"role": "user", "content": f"Store {json.dumps(value)}."}], [tool], ("store", {}))
        for stream in (False, True) if context.offers.stream else (False,):
            try:
                answer = demand(context, talk, stream)
            except NoCalls as error:
                yield Finding("not offered", str(error))
                return
            except Refused as error:
                if error.status >= 500:
                    raise
                break  # the schema is refused
            if answer.calls and answer.finish_reason != "length":
                what = f"{name} in a call" + " of a stream" * stream
                yield compared(what, {"x": value}, answer.calls[0].value())


def read_pairs(context: Context) -> list[tuple[Talk, Read, ToolAnswer]]:
    """Greedy answers of reference and server to the same conversations with tools on auto."""
    if context.pairs is None:
        rng = random.Random(f"tools {context.seed}")  # whichever check asks first
        found = talks(context.limits.num_talks, rng.randrange(2**31))
        reads = context.oracle.chat.greedy(found, MAX_TOKENS)
        asks = [partial(ask, context, talk, max_tokens=MAX_TOKENS, tool_choice="auto") for talk in found]
        answers = context.server.at_once(asks, context.limits.concurrency)
        context.pairs = list(zip(found, reads, answers))
    return context.pairs


def no_tools(context: Context) -> Finding | None:
    if (missing := no_chat(context)) is not None:
        return missing
    if not context.oracle.chat.has_tools or "none" in context.oracle.chat.dialect.tool_parsers:
        return Finding("not offered", "the model's chat template has no tools of a known form")
    return None


def is_sure(context: Context, read: Read) -> bool:
    """Whether every server of this format writes the same tokens."""
    tolerance = context.tolerance
    return read.lead > 2 * (tolerance.typical_error if tolerance.outliers else tolerance.max_error) * 2


@check(
    "tools.trigger",
    "The server calls a tool where the reference does, and not elsewhere.",
    "K2's vendor verifier compares this F1 between runs with noise; greedy answers need none.",
)
def trigger(context: Context) -> Iterator[Finding]:
    if (missing := no_tools(context)) is not None:
        yield missing
        return
    pairs = read_pairs(context)
    expected = [bool(read.calls) for _, read, _ in pairs]
    actual = [bool(answer.calls) for *_, answer in pairs]
    if len(set(expected)) < 2:
        how = "always" if expected[0] else "never"
        yield Finding("not offered", f"the model {how} calls a tool in {len(pairs)} conversations")
        return
    evidence = {"F1": f1(expected, actual), "conversations": len(pairs)}
    others = [i for i in range(len(pairs)) if expected[i] != actual[i]]
    sure = [i for i in others if is_sure(context, pairs[i][1])]
    if sure or len(others) > max(1, len(pairs) // 5):
        talk, read, answer = pairs[(sure or others)[0]]
        what = f"{len(others)} of {len(pairs)} conversations have a call on one side only"
        evidence["request"] = talk.messages[-1]["content"]
        found = (answer.content, [call.name for call in answer.calls])
        yield Finding("fails", what, [name for name, _ in read.calls], found, evidence)
    else:
        status: Status = "near tie" if others else "holds"
        yield Finding(status, "calls in the same conversations", evidence=evidence, num_cases=len(pairs))


def f1(expected: Sequence[bool], actual: Sequence[bool]) -> float:
    """The F1 score of calls."""
    both = sum(a and b for a, b in zip(expected, actual))
    return 2 * both / max(sum(expected) + sum(actual), 1)


@check(
    "tools.parsed",
    "Names, arguments and text of an answer are those that the model wrote.",
    "A parser that loses a character of the arguments changes what the tool does.",
)
def parsed(context: Context) -> Iterator[Finding]:
    if (missing := no_tools(context)) is not None:
        yield missing
        return
    num_sure = 0
    for talk, read, answer in read_pairs(context):
        if not is_sure(context, read) or read.finish_reason == "length":
            continue
        num_sure += 1
        evidence = {"request": talk.messages[-1]["content"]}
        expected = [[name, _json(text)] for name, text in read.calls]
        actual = [[call.name, _json(call.arguments)] for call in answer.calls]
        if expected != actual:
            yield Finding("fails", "the calls of an answer", expected, actual, evidence)
        elif read.content.strip() != answer.content.strip():
            yield Finding("fails", "the text of an answer", read.content, answer.content, evidence)
        else:
            yield compared("finish_reason", read.finish_reason, answer.finish_reason, **evidence)
    if not num_sure:
        yield Finding("not offered", "no answer is certain within the tolerance")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@check(
    "tools.leak",
    "No marker of a call, of reasoning or of a turn is in the text of an answer.",
    "Users see <tool_call> in the chat.",
)
def leak(context: Context) -> Iterator[Finding]:
    if (missing := no_tools(context)) is not None:
        yield missing
        return
    pairs = list(read_pairs(context))
    if context.offers.stream:  # markers in pieces
        first = pairs[:NUM_STREAMED]
        asks = [
            partial(ask, context, talk, True, max_tokens=MAX_TOKENS, tool_choice="auto") for talk, *_ in first
        ]
        answers = context.server.at_once(asks, context.limits.concurrency)
        pairs += [(talk, read, answer) for (talk, read, _), answer in zip(first, answers)]
    for talk, read, answer in pairs:
        for marker in context.oracle.chat.markers:
            if marker in answer.content and marker not in read.content:
                evidence = {"request": talk.messages[-1]["content"]}
                what = f"{marker} in the text of an answer"
                yield Finding("fails", what, read.content, answer.content, evidence)
    yield Finding("holds", "texts of answers", num_cases=len(pairs))
