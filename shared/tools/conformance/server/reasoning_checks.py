"""Checks of reasoning: it is apart from the text, can be turned off, and is in the history or not as the chat
template says."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Refused
from diptych.shared.tools.conformance.server.conversations import (
    KINDS,
    Talk,
    call_message,
    result_message,
    talks,
    tool_of,
)
from diptych.shared.tools.conformance.server.prompt_checks import no_chat, same_prompt
from diptych.shared.tools.conformance.server.semantics import compared
from diptych.shared.tools.conformance.server.tool_answers import ask
from diptych.shared.tools.conformance.server.tool_parsing import MAX_TOKENS, is_sure


def no_reasoning(context: Context) -> Finding | None:
    if (missing := no_chat(context)) is not None:
        return missing
    if context.oracle.chat.dialect.reasoning is None or not context.oracle.chat.thinking_switch:
        return Finding("not offered", "the chat template has no switch for thinking")
    return None


def plain_talks(context: Context) -> list[Talk]:
    found = talks(8, context.rng.randrange(2**31))
    return [talk._replace(tools=[]) for talk in found if talk.call is None][:3]


@check(
    "reasoning.apart",
    "Reasoning is in a field of its own, and the text has none of it.",
    "Clients show the text, and parse it as JSON.",
)
def apart(context: Context) -> Iterator[Finding]:
    if (missing := no_reasoning(context)) is not None:
        yield missing
        return
    found = plain_talks(context)
    for talk, read in zip(found, context.oracle.chat.greedy(found, MAX_TOKENS)):
        if not is_sure(context, read) or read.finish_reason == "length":
            continue
        for stream in (False, True) if context.offers.stream else (False,):
            answer = ask(context, talk, stream, max_tokens=MAX_TOKENS)
            yield compared("reasoning of an answer", read.reasoning.strip(), answer.reasoning.strip())
            yield compared("text behind the reasoning", read.content.strip(), answer.content.strip())


@check(
    "reasoning.off",
    "With thinking off, the prompt is the template's, and the answer has no reasoning.",
    "Latency budgets and benchmarks without thinking depend on it.",
)
def off(context: Context) -> Iterator[Finding]:
    if (missing := no_reasoning(context)) is not None:
        yield missing
        return
    switch = {context.oracle.chat.thinking_switch: False}
    found = plain_talks(context)
    for talk, read in zip(found, context.oracle.chat.greedy(found, MAX_TOKENS, **switch)):
        yield same_prompt(context, talk, "a request with thinking off", **switch)
        if read.reasoning or not is_sure(context, read):
            continue
        try:
            answer = ask(context, talk, max_tokens=MAX_TOKENS, chat_template_kwargs=switch)
        except Refused as error:
            yield Finding("not offered", f"chat_template_kwargs: {error}")
            return
        yield compared("reasoning with thinking off", "", answer.reasoning)
        yield compared("text with thinking off", read.content.strip(), answer.content.strip())


@check(
    "reasoning.history",
    "Earlier reasoning is in the prompt, or left out, as the chat template says.",
    "Old thoughts fill the context; some models need them between calls.",
)
def history(context: Context) -> Iterator[Finding]:
    if (missing := no_reasoning(context)) is not None:
        yield missing
        return
    user = {"role": "user", "content": "What is 12 + 30?"}
    thought = {"role": "assistant", "content": "12 + 30 = 42", "reasoning_content": "I know this."}
    again = {"role": "user", "content": "And 5 + 6?"}
    switch = {context.oracle.chat.thinking_switch: False}
    talk = Talk([user, thought, again], [], None)
    yield same_prompt(context, talk, "earlier reasoning in its own field")
    yield same_prompt(context, talk, "earlier reasoning, with thinking off", **switch)
    if context.oracle.chat.has_tools:
        call_id, tool = context.oracle.chat.dialect.new_id("f", 0), tool_of(KINDS[0])
        call = call_message(call_id, KINDS[0].name, {"city": "Rome", "days": 2})
        call["reasoning_content"] = "I need the weather."
        talk = Talk([user, call, result_message(call_id, "{}")], [tool], None)
        yield same_prompt(context, talk, "reasoning beside a call")
        yield same_prompt(context, talk, "reasoning beside a call, with thinking off", **switch)
