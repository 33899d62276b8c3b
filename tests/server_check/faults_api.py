"""Faults of the API: stops, lengths, counts, streams, errors."""

from __future__ import annotations

from typing import Any

from tests.server_check.faults import changes_reply, changes_request, fault
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Reply


@changes_request("stop dropped", "Stop texts have no effect.", "semantics.stop")
def stop_dropped(body: Body) -> Body | None:
    return {"stop": None}


@changes_request("stop text kept", "The text of an answer ends with the stop text.", "semantics.stop")
def stop_text_kept(body: Body) -> Body | None:
    return {"include_stop_str_in_output": True} if body.get("stop") else None


@changes_request(
    "one token too many", "An answer has one token more than max_tokens.", "semantics.max_tokens"
)
def one_token_too_many(body: Body) -> Body | None:
    return {"max_tokens": body["max_tokens"] + 1} if body.get("max_tokens") else None


@changes_reply("wrong usage", "usage counts one completion token too few.", "semantics.usage")
def wrong_usage(body: Body, reply: Reply) -> None:
    for chunk in reply.chunks:
        usage = chunk.get("usage")
        if usage:
            usage["completion_tokens"] -= 1
            usage["total_tokens"] -= 1


@changes_reply("usage of one choice", "usage counts one of n choices.", "semantics.usage_n")
def usage_of_one_choice(body: Body, reply: Reply) -> None:
    n = body.get("n") or 1
    for usage in (chunk["usage"] for chunk in reply.chunks if chunk.get("usage")):
        usage["completion_tokens"] //= n
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


@changes_reply("prompt counted n times", "usage counts the prompt for each choice.", "semantics.usage_n")
def prompt_counted_n_times(body: Body, reply: Reply) -> None:
    n = body.get("n") or 1
    for usage in (chunk["usage"] for chunk in reply.chunks if chunk.get("usage")):
        usage["prompt_tokens"] *= n
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


@changes_reply("wrong total", "usage's total_tokens leaves out the prompt.", "semantics.usage")
def wrong_total(body: Body, reply: Reply) -> None:
    for chunk in reply.chunks:
        usage = chunk.get("usage")
        if usage:
            usage["total_tokens"] = usage["completion_tokens"]


@changes_reply(
    "wrong finish_reason", 'finish_reason is "stop" for an answer cut by max_tokens.', "semantics.max_tokens"
)
def wrong_finish_reason(body: Body, reply: Reply) -> None:
    for choice in reply.choices:
        if choice.get("finish_reason") == "length":
            choice["finish_reason"] = "stop"


@changes_reply("index always 0", "Every choice has index 0.", "semantics.n")
def index_always_0(body: Body, reply: Reply) -> None:
    for choice in reply.choices:
        choice["index"] = 0


@changes_reply("lost chunk", "A stream lacks its second chunk.", "streaming.same_answer")
def lost_chunk(body: Body, reply: Reply) -> None:
    if reply.is_stream and len(reply.chunks) > 2:
        del reply.chunks[1]


@changes_reply(
    "stripped stream", "A streamed answer lacks the spaces at the start of chunks.", "streaming.same_answer"
)
def stripped_stream(body: Body, reply: Reply) -> None:
    if not reply.is_stream:
        return
    for choice in reply.choices:
        place: dict[str, Any] = choice.get("delta", choice)
        for name in ("text", "content"):
            if place.get(name):
                place[name] = place[name].lstrip()


@changes_request(
    "stream differs", "A streamed answer is sampled even at temperature 0.", "streaming.same_answer"
)
def stream_differs(body: Body) -> Body | None:
    return {"temperature": 1.5} if body.get("stream") else None


@changes_reply("no finish chunk", "No chunk of a stream has a finish_reason.", "streaming.finish")
def no_finish_chunk(body: Body, reply: Reply) -> None:
    if reply.is_stream:
        for choice in reply.choices:
            choice["finish_reason"] = None


@changes_reply("no DONE", "A stream ends without [DONE].", "streaming.events")
def no_done(body: Body, reply: Reply) -> None:
    reply.has_done = False


@changes_reply("no streamed usage", "include_usage has no effect.", "streaming.usage")
def no_streamed_usage(body: Body, reply: Reply) -> None:
    if reply.is_stream:
        reply.chunks = [chunk for chunk in reply.chunks if not chunk.get("usage")]


@changes_request(
    "wrong type accepted", "max_tokens of a wrong type counts as not given.", "semantics.wrong_type"
)
def wrong_type_accepted(body: Body) -> Body | None:
    return None if isinstance(body.get("max_tokens"), int) else {"max_tokens": None}


@fault("long prompt cut", "A prompt longer than the context is cut.", "semantics.context")
async def long_prompt_cut(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    longest = 1024
    prompts = proxy.prompts(body)
    if any(len(prompt) > longest for prompt in prompts):
        return await ask({**body, "prompt": [prompt[:longest] for prompt in prompts]})
    return await ask(body)


@fault("flat error", "An error is not inside an `error` object.", "semantics.wrong_type")
async def flat_error(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    reply = await ask(body)
    if reply.status != 200:
        reply.chunks = [reply.chunks[0]["error"]]
    return reply


@fault("error 500", "A bad request is answered with status 500.", "semantics.wrong_type")
async def error_500(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    reply = await ask(body)
    if 400 <= reply.status < 500:
        reply.status = 500
    return reply
