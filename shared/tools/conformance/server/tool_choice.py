"""Checks of tool_choice, and of the form of answers with calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, Status, check
from diptych.shared.tools.conformance.server.client import Refused
from diptych.shared.tools.conformance.server.conversations import KINDS, Talk, talk, talks, tool_of
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.refusals import refusal
from diptych.shared.tools.conformance.server.semantics import CHAT, MESSAGES, compared
from diptych.shared.tools.conformance.server.tool_answers import (
    NoCalls,
    ToolAnswer,
    ask,
    demand,
    demanded,
)

JSON = dict[str, Any]
HOT = {"temperature": 1.0}


def asking(context: Context, num: int) -> list[Talk]:
    """Conversations that need a call."""
    return talks(2 * num, context.rng.randrange(2**31))[::2]


def unasked(context: Context, num: int) -> list[Talk]:
    """Conversations with two tools that need no call; `call` names the second tool, to be demanded."""
    found = []
    rng = random.Random(context.rng.randrange(2**31))
    for _ in range(num):
        tools = [tool_of(kind) for kind in rng.sample(KINDS, 2)]
        plain = talk(rng, needs_call=False)
        found.append(Talk(plain.messages, tools, (tools[1]["function"]["name"], {})))
    return found


def whole(answer: ToolAnswer, what: str, talk: Talk) -> Finding:
    """Fails for an answer without a call, or with one of a tool that was not offered."""
    names = {tool["function"]["name"] for tool in talk.tools}
    made = [call.name for call in answer.calls]
    if not made:
        return Finding("fails", f"{what}: no call", sorted(names), answer.content or answer.finish_reason)
    if not set(made) <= names:
        return Finding("fails", f"{what}: a call of a tool that was not offered", sorted(names), made)
    if answer.finish_reason not in ("tool_calls", "stop", "length"):  # a long text of an argument is cut
        return Finding("fails", f"{what}: finish_reason", "tool_calls", answer.finish_reason)
    return Finding("holds", what)


def tried(context: Context, mode: str, what: str) -> Iterator[Finding]:
    """The answers to a demand, whole and streamed; a refusal is not offered."""
    for each in unasked(context, 2):
        for stream in (False, True) if context.offers.stream else (False,):
            try:
                answer = ask(context, each, stream, **demanded(each, mode), **HOT)
            except Refused as error:
                if error.status >= 500:
                    raise
                yield Finding("not offered", f"{what}: {error}")
                return
            yield whole(answer, what, each)
            if mode == "named" and answer.calls:
                assert each.call is not None
                made = [call.name for call in answer.calls]
                yield compared("the calls of a named tool", [each.call[0]], made)


@check("tools.required", "tool_choice required gives calls of the offered tools.", "Agents wait for a call.")
def required(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    yield from tried(context, "required", "tool_choice required")


@check("tools.named", "A named tool gives exactly one call, of this tool.", "Extraction reads the one call.")
def named(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    yield from tried(context, "named", "a named tool")


@check("tools.none", "tool_choice none gives text, although the request needs a tool.", "The text is wanted.")
def none(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for each in asking(context, 3):
        try:
            answer = ask(context, each, tool_choice="none", max_tokens=60)
        except Refused as error:
            if error.status >= 500:
                raise
            yield Finding("not offered", f"tool_choice none: {error}")
            return
        yield compared("calls of tool_choice none", [], [call.name for call in answer.calls])


@check(
    "tools.parallel",
    "parallel_tool_calls false gives at most one call.",
    "A client that runs one call drops the others.",
)
def parallel(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for each in asking(context, 3):
        try:
            extra = demanded(each, "required")
            answer = ask(context, each, parallel_tool_calls=False, **extra, temperature=1.5)
        except Refused as error:
            if error.status >= 500:
                raise
            yield Finding("not offered", f"parallel_tool_calls: {error}")
            return
        num = len(answer.calls)
        yield Finding("holds" if num <= 1 else "fails", "calls with parallel_tool_calls false", 1, num)


@check("tools.without_tools", "A demand for a call without tools is refused.", "It can never be satisfied.")
def without_tools(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    body = {"model": context.server.model, "messages": MESSAGES, "max_tokens": 2, "tool_choice": "required"}
    yield refusal("tool_choice required without tools", context.server.post(CHAT, body))
    talk = asking(context, 1)[0]
    other = {"type": "function", "function": {"name": "no_such_tool"}}
    body = {**body, "messages": talk.messages, "tools": talk.tools, "tool_choice": other}
    yield refusal("tool_choice names a tool that is not in tools", context.server.post(CHAT, body))


@check(
    "tools.stream",
    "A streamed answer with calls is the same as a whole one; deltas have the form that clients join.",
    "OpenAI's client adds up the texts of deltas: a repeated name is getget.",
)
def stream(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None or not context.offers.stream:
        yield missing or Finding("not offered", context.offers.reason("stream"))
        return
    seen: set[str] = set()
    for each in asking(context, 3):
        try:
            one, two = demand(context, each), demand(context, each, stream=True)
        except NoCalls as error:
            yield Finding("not offered", str(error))
            return
        for name, answer in (("a whole answer", one), ("a stream", two)):
            yield Finding("fails" if answer.wrong else "holds", f"form of {name}: {'; '.join(answer.wrong)}")
            ids = {call.call_id for call in answer.calls}
            if ids & seen:
                yield Finding("fails", "two answers have a call with the same id", actual=sorted(ids & seen))
            seen |= ids
        yield _same(context, each, one, two)


def _same(context: Context, talk: Talk, one: ToolAnswer, two: ToolAnswer) -> Finding:
    """Whole and streamed answers are equal; a server whose whole answers differ decides nothing."""
    if one.same() == two.same():
        return Finding("holds", "a call whole and streamed")
    again = demand(context, talk)
    status: Status = "fails" if again.same() == one.same() else "near tie"
    return Finding(status, "a streamed answer differs from the whole one", list(one.same()), list(two.same()))


@check(
    "tools.cut",
    "A call that max_tokens cuts has finish_reason length, a complete one has not.",
    "A client runs a call whose finish_reason says that it is complete.",
)
def cut(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for each in asking(context, 2):
        for streamed in (False, True) if context.offers.stream else (False,):
            try:
                full = demand(context, each, streamed)
                answer = demand(context, each, streamed, max_tokens=6)
            except NoCalls as error:
                yield Finding("not offered", str(error))
                return
            yield compared("finish_reason of a call that 6 tokens cut", "length", answer.finish_reason)
            yield whole(full, "a complete call", each)


@check(
    "tools.format",
    "With a response_format and tools on auto, the answer is valid calls or a text of the format.",
    "Agents ask for a format of the final answer and still need their tools.",
)
def with_format(context: Context) -> Iterator[Finding]:
    from diptych.shared.tools.conformance.server.schemas import problem

    if (missing := no_chat(context)) is not None:
        yield missing
        return
    schema: JSON = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    expects = asking(context, 2)
    num_called, plain = 0, talks(4, context.rng.randrange(2**31))[1::2]
    for each in [*expects, *plain]:
        try:
            answer = ask(context, each, response_format=shape)
        except Refused as error:
            if error.status >= 500:
                raise
            yield Finding("not offered", f"response_format beside tools: {error}")
            return
        num_called += bool(answer.calls)
        if answer.calls:
            yield whole(answer, "calls beside a response_format", each)
        elif answer.finish_reason != "length":
            wrong = problem(answer.content, schema)
            yield Finding("fails" if wrong else "holds", "the text of a response_format", schema, wrong)
    reads = context.oracle.chat.greedy(expects, 120) if context.oracle.chat.has_tools else []
    if reads and all(read.calls for read in reads) and not num_called:
        yield Finding(
            "fails", "no call beside a response_format, where the model makes one without", len(reads), 0
        )
