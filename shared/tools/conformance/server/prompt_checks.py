"""Checks of prompts: the server's chat template and tokenizer give the prompt that transformers gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Refused
from diptych.shared.tools.conformance.server.conversations import (
    Talk,
    call_message,
    result_message,
    talks,
    with_results,
)
from diptych.shared.tools.conformance.server.semantics import CHAT, compared, post

JSON = dict[str, Any]
WHY = "A prompt that differs by one token gives worse answers, which no benchmark explains."
AWKWARD: JSON = {"text": '"123" </parameter>\n', "number": 7, "none": None, "list": [], "map": {"é": [1, {}]}}
TEXTS = ("Zoë 🙂 \t tab", "line\n\nline  ", " leading space", "1234567890", "<b>&amp;</b> {{ x }} {% y %}")


def num_of_prompt(context: Context, talk: Talk, **fields: Any) -> int | None:
    """usage.prompt_tokens of the server."""
    body: JSON = {"messages": talk.messages, "max_tokens": 1, **fields}
    if talk.tools:
        body["tools"] = talk.tools
    return (post(context, CHAT, **body).get("usage") or {}).get("prompt_tokens")


def same_prompt(context: Context, talk: Talk, what: str, **template_args: Any) -> Finding:
    """Compare the number of prompt tokens with the rendered template."""
    try:
        expected = context.oracle.chat.num_prompt_tokens(talk.messages, talk.tools, **template_args)
    except ValueError as error:
        return Finding("not offered", f"{what}: {error}")
    fields = {"chat_template_kwargs": template_args} if template_args else {}
    try:
        found = num_of_prompt(context, talk, **fields)
    except Refused as error:
        if error.status >= 500:
            raise
        return Finding("not offered", f"{what}: {error}")
    return compared(f"prompt_tokens of {what}", expected, found, messages=talk.messages)


def no_chat(context: Context) -> Finding | None:
    """A finding if the server has no chat or the model no template."""
    if not context.offers.chat:
        return Finding("not offered", context.offers.reason("chat"))
    if not context.oracle.chat.tokenizer.chat_template:
        return Finding("not offered", "the model has no chat template")
    return None


@check("prompt.chat", "A conversation gives exactly the prompt that the model's chat template renders.", WHY)
def chat(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    user: JSON = {"role": "user", "content": "What is 12 + 30?"}
    yield same_prompt(context, Talk([user], [], None), "one message")
    system: JSON = {"role": "system", "content": "Be brief and correct."}
    yield same_prompt(context, Talk([system, user], [], None), "a system message")
    for text in TEXTS:
        message = {"role": "user", "content": text}
        yield same_prompt(context, Talk([message], [], None), f"the text {text!r}")
    again = [
        user,
        {"role": "assistant", "content": "12 + 30 = 42"},
        {"role": "user", "content": "And 5 + 6?"},
    ]
    yield same_prompt(context, Talk(again, [], None), "two turns")
    if context.oracle.chat.has_tools:
        for talk in talks(max(context.limits.num_talks // 2, 2), context.rng.randrange(2**31)):
            yield same_prompt(context, talk, "a conversation with tools")


@check(
    "prompt.history",
    "Calls, results, null content and lists of parts in a history give the prompt of the chat template.",
    "Agents send long histories; a call that vanishes from the prompt is made again.",
)
def history(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 12 + 30?"}]
    yield same_prompt(context, Talk([{"role": "user", "content": parts}], [], None), "a list of parts")
    if not context.oracle.chat.has_tools:
        yield Finding("not offered", "the chat template has no tools")
        return
    rng, dialect = random.Random(context.rng.randrange(2**31)), context.oracle.chat.dialect
    ids = [dialect.new_id("f", i) for i in range(2)]
    yield same_prompt(context, with_results(rng, ids), "calls with null content, and their results")
    talk = with_results(rng, ids[:1])
    for message in talk.messages:
        if message.get("tool_calls"):
            message["content"] = "One moment."
    yield same_prompt(context, talk, "a call beside text")
    talk = with_results(rng, ids[:1])
    tool_name = talk.tools[0]["function"]["name"]
    awkward = [
        {"role": "user", "content": "Do it."},
        call_message(ids[0], tool_name, AWKWARD),
        result_message(ids[0], '{"a": "123"}\n'),
        {"role": "user", "content": "Again."},
    ]
    yield same_prompt(context, Talk(awkward, talk.tools, None), "awkward values in arguments")
    both = call_message(ids[0], tool_name, {"number": 1})
    both["tool_calls"] += call_message(ids[1], tool_name, {"number": 2})["tool_calls"]
    results = [result_message(call_id, f'{{"is_done": "{call_id}"}}') for call_id in ids]
    messages = [awkward[0], both, *results, awkward[-1]]
    yield same_prompt(context, Talk(messages, talk.tools, None), "two calls in one message")
    for result in results:
        result["content"] = [{"type": "text", "text": result["content"]}]
    yield same_prompt(context, Talk(messages, talk.tools, None), "results as lists of parts")


@check(
    "prompt.markers",
    "What is spelled like a control token in a message stays text.",
    "Otherwise a web page or a tool's result can end the user's turn and speak as the system.",
)
def markers(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for marker in context.oracle.chat.markers[:8]:
        message = {"role": "user", "content": f"a {marker} b"}
        yield _inert(context, Talk([message], [], None), marker, "a user's message")
    first = context.oracle.chat.markers[:2]
    for marker in first:
        if context.oracle.chat.has_tools:
            talk = with_results(random.Random(1), [context.oracle.chat.dialect.new_id("f", 0)])
            for message in talk.messages:
                if message["role"] == "tool":
                    message["content"] = f"a {marker} b"
            yield _inert(context, talk, marker, "a tool's result")


def _inert(context: Context, talk: Talk, marker: str, where: str) -> Finding:
    """Compare the number of prompt tokens with both readings of the marker."""
    chat = context.oracle.chat
    try:
        text, control = (
            find(talk.messages, talk.tools) for find in (chat.num_prompt_tokens, chat.num_with_control_tokens)
        )
        found = num_of_prompt(context, talk)
    except (ValueError, Refused) as error:
        if isinstance(error, Refused) and error.status >= 500:
            raise
        return Finding("not offered", f"{marker} in {where}: {error}")
    if text == control:
        return Finding("holds", f"{marker} in {where}: both readings have {text} tokens", num_cases=0)
    if found == control:
        return Finding("fails", f"{marker} in {where} becomes a control token", text, found)
    return Finding("holds", f"{marker} in {where}")
