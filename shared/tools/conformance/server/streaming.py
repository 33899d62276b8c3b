"""Checks of streams: the same answers as whole responses, in chunks that public clients can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Malformed, Refused
from diptych.shared.tools.conformance.server.same import ask_prompt, greedy, greedy_params, same_answers
from diptych.shared.tools.conformance.server.semantics import CHAT, COMPLETIONS, MESSAGES, compared

JSON = dict[str, Any]


def chunks_of(context: Context, path: str, **fields: Any) -> tuple[list[JSON], list[str]]:
    """The chunks of a stream, and defects of its form that break clients. Raises `Refused`, and `Malformed`
    for a chunk that is no JSON object."""
    body = {"model": context.server.model, "temperature": 0, "stream": True, **fields}
    status, headers, text = context.server.post(path, body)
    if not 200 <= status < 300:
        raise Refused(status, text)
    if not isinstance(text, str):
        raise Malformed("no stream although the request asks for one", text)
    wrong = []
    kind = headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        wrong.append(f"content-type is {kind!r}, not text/event-stream")
    events = [event for event in text.replace("\r\n", "\n").split("\n\n") if event.strip()]
    data = []
    for event in events:
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        found = [line[5:].strip() for line in lines if line.startswith("data:")]
        if len(found) > 1:
            wrong.append(
                f"an event of {len(found)} data lines, or events without an empty line between: {event[:200]}"
            )
        data += found
    if not data or data[-1] != "[DONE]":
        wrong.append(f"the stream does not end with data: [DONE] but with {data[-1:]}")
    try:
        chunks = [json.loads(each) for each in data if each != "[DONE]"]
    except ValueError:
        raise Malformed("a chunk that is no JSON", data) from None
    if not all(isinstance(chunk, dict) for chunk in chunks):
        raise Malformed("a chunk that is no JSON object", data)
    return chunks, wrong


def paths(context: Context) -> Iterator[tuple[str, JSON]]:
    """Path and prompt of each kind of stream that the server has."""
    if context.offers.stream:
        yield COMPLETIONS, {"prompt": ask_prompt(context)}
    if context.offers.chat:
        yield CHAT, {"messages": MESSAGES}


@check(
    "streaming.same_answer",
    "A stream's pieces, put together, are the answer of a request that does not stream.",
    "Users read streams, and tests read whole responses.",
)
def same_answer_streamed(context: Context) -> Iterator[Finding]:
    server, num = context.server, context.limits.max_tokens
    if not context.offers.stream:
        yield Finding("not offered", context.offers.reason("stream"))
        return
    pairs = []
    for prompt in context.prompts[:3]:
        streamed = server.stream(ask_prompt(context, prompt), **greedy_params(context, num))[0]
        pairs.append((greedy(context, prompt, num), streamed, "whole, and streamed"))
    if context.offers.chat:
        params: JSON = {"temperature": 0, "max_tokens": num}
        if context.offers.chat_logprobs:
            params |= {"logprobs": True, "top_logprobs": 1}
        whole, streamed = server.chat(MESSAGES, **params)[0], server.chat(MESSAGES, stream=True, **params)[0]
        pairs.append((whole, streamed, "a chat whole, and streamed"))
    yield from same_answers(context, pairs)


@check(
    "streaming.stop",
    "A stream with a stop string never shows a part of it.",
    "What was streamed cannot be taken back.",
)
def stop(context: Context) -> Iterator[Finding]:
    if not context.offers.stream:
        yield Finding("not offered", context.offers.reason("stream"))
        return
    for prompt in context.prompts[:4]:
        text = greedy(context, prompt, 24).text
        cut = text[len(text) // 2 : len(text) // 2 + 5]
        if len(cut) < 5 or "\ufffd" in text:
            continue
        whole = greedy(context, prompt, 24, stop=[cut])
        params = greedy_params(context, 24) | {"stop": [cut]}
        streamed = context.server.stream(ask_prompt(context, prompt), **params)[0]
        if cut in streamed.text:
            yield Finding(
                "fails", "the stop string is in the stream", whole.text, streamed.text, {"stop": cut}
            )
        elif streamed.text != whole.text and whole.text.startswith(streamed.text) | streamed.text.startswith(
            whole.text
        ):
            yield Finding(
                "fails", "the stream is cut at another place", whole.text, streamed.text, {"stop": cut}
            )
        else:
            yield compared(
                "finish_reason of a stream that a stop string ends",
                whole.finish_reason,
                streamed.finish_reason,
                stop=cut,
            )


@check(
    "streaming.events",
    "Each event is one data line of JSON, [DONE] the last; all chunks have one id and the right object.",
    "Clients read events line by line, and wait for [DONE].",
)
def events(context: Context) -> Iterator[Finding]:
    for path, prompt in paths(context):
        chunks, wrong = chunks_of(context, path, max_tokens=5, **prompt)
        yield Finding("fails" if wrong else "holds", "; ".join(wrong) or f"events of {path}")
        yield compared(
            f"number of ids in a stream of {path}", 1, len({str(chunk.get("id")) for chunk in chunks})
        )
        kind = "chat.completion.chunk" if path == CHAT else "text_completion"
        yield compared(
            f"object of the chunks of {path}", [kind], sorted({str(c.get("object")) for c in chunks})
        )


@check(
    "streaming.finish",
    "Each choice ends with exactly one finish_reason, and it is null before.",
    "A client stops reading at the first finish_reason, and waits for one.",
)
def finish(context: Context) -> Iterator[Finding]:
    for path, prompt in paths(context):
        for n in (1, 2) if context.offers.n else (1,):
            more = {"n": 2, "temperature": 1} if n == 2 else {}
            chunks, _ = chunks_of(context, path, max_tokens=5, **prompt, **more)
            reasons: dict[int, list[Any]] = {}
            for choice in (choice for chunk in chunks for choice in chunk.get("choices") or ()):
                reasons.setdefault(choice.get("index"), []).append(choice.get("finish_reason"))
            what = f"{path} with n={n}"
            yield compared(f"indices of {what}", list(range(n)), sorted(reasons))
            for index, found in reasons.items():
                ends = [reason for reason in found if reason is not None]
                if len(ends) != 1 or found[-1] is None or ends[0] == "":
                    yield Finding(
                        "fails",
                        f"finish_reasons of choice {index} of {what}",
                        "one, in its last chunk",
                        found,
                    )


@check(
    "streaming.usage",
    "usage comes in a last chunk without choices, with include_usage only.",
    "Clients read choices[0] of every chunk unless they asked for usage.",
)
def usage(context: Context) -> Iterator[Finding]:
    for path, prompt in paths(context):
        chunks, _ = chunks_of(context, path, max_tokens=5, **prompt)
        empty = [chunk for chunk in chunks if not chunk.get("choices")]
        if empty:
            yield Finding(
                "fails", f"a chunk of {path} without choices that was not asked for", actual=empty[0]
            )
        asked, _ = chunks_of(context, path, max_tokens=5, stream_options={"include_usage": True}, **prompt)
        counts = [chunk["usage"] for chunk in asked if chunk.get("usage")]
        if not counts:
            yield Finding("fails", f"include_usage, but no chunk of {path} has usage", actual=asked[-1])
            continue
        whole = {"max_tokens": 5, "model": context.server.model, "temperature": 0, **prompt}
        _, _, body = context.server.post(path, whole)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        expected = {name: ((body or {}).get("usage") or {}).get(name) for name in names}
        yield compared(
            f"usage of a stream of {path}", expected, {name: counts[-1].get(name) for name in names}
        )


@check(
    "streaming.chat_role",
    "The first delta of a chat has the role, and no later one repeats it.",
    "OpenAI's client joins repeated strings: assistantassistant.",
)
def chat_role(context: Context) -> Iterator[Finding]:
    if not context.offers.chat:
        yield Finding("not offered", context.offers.reason("chat"))
        return
    chunks, _ = chunks_of(context, CHAT, messages=MESSAGES, max_tokens=5)
    deltas = [choice.get("delta") for chunk in chunks for choice in chunk.get("choices") or ()]
    if not all(isinstance(delta, dict) for delta in deltas):
        yield Finding("fails", "a chunk of a chat without delta", actual=deltas)
        return
    roles = [delta.get("role") for delta in deltas]
    yield compared("role of the first delta", "assistant", roles[0] if roles else None)
    again = [role for role in roles[1:] if role is not None]
    if again:
        yield Finding("fails", "the role is repeated", 0, len(again))
