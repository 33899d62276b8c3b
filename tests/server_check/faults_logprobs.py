"""Faults in log-probabilities: of a position, of the KV cache, of batches, of the list."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from tests.server_check.faults import changes_reply, fault
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Reply
from tests.server_check.logprob_entries import Entry, entries_of, put_entries

PAGE, CHUNK = 16, 100
OTHER_TOKEN = 300
DRIFT = 0.75
GATHER_SECONDS = 0.03
"""A request waits so long for others, so that concurrent requests meet in the proxy on any computer."""


def each_choice(reply: Reply, change: Callable[[list[Entry]], list[Entry]]) -> None:
    for choice in reply.choices:
        entries = entries_of(choice)
        if entries:
            put_entries(choice, change(entries))


def drifted(entries: list[Entry], first: int = 0) -> list[Entry]:
    """Entries from `first` on are less likely by DRIFT."""
    return [
        entry
        if entry.logprob is None or i < first
        else Entry(
            entry.token, entry.logprob - DRIFT, [(token, value - DRIFT) for token, value in entry.top or []]
        )
        for i, entry in enumerate(entries)
    ]


async def with_stale_prefix(body: Body, ask: Ask, proxy: FaultyProxy, length: int) -> Reply:
    """The answer to prompts whose first `length` tokens are others, where something comes behind them. An
    echo hides it: texts, tokens and log-probabilities of these first tokens are right."""
    prompts = proxy.prompts(body)
    changed = [
        [OTHER_TOKEN] * length + prompt[length:] if len(prompt) > length + 1 else prompt for prompt in prompts
    ]
    if changed == prompts:
        return await ask(body)
    reply = await ask({**body, "prompt": changed})
    if reply.status != 200 or not body.get("echo") or reply.is_stream:
        return reply
    right = await ask(body)
    for choice, right_choice in zip(reply.choices, right.choices):
        i = choice["index"] // body.get("n", 1)
        num_changed_chars = len(proxy.tokenizer.decode(changed[i]))
        choice["text"] = proxy.tokenizer.decode(prompts[i]) + choice["text"][num_changed_chars:]
        entries, right_entries = entries_of(choice), entries_of(right_choice)
        if entries:
            put_entries(choice, right_entries[: length + 1] + entries[length + 1 :])
    return reply


@changes_reply("wrong position", "Log-probabilities are those of the position before.", "scoring.prompt")
def wrong_position(body: Body, reply: Reply) -> None:
    def shift(entries: list[Entry]) -> list[Entry]:
        last = [entries[0], *entries[:-1]]
        return [
            now if now.logprob is None or before.logprob is None else replace(before, token=now.token)
            for now, before in zip(entries, last)
        ]

    each_choice(reply, shift)


@fault(
    "stale page",
    "The first page of a prompt, of 16 tokens, holds K and V of another prompt.",
    "scoring.prompt",
)
async def stale_page(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    return await with_stale_prefix(body, ask, proxy, PAGE)


@fault(
    "stale cached page",
    "A prompt whose first page is cached reads another prompt's page there.",
    "dependence.shared_prefix",
)
async def stale_cached_page(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    is_hit = proxy.has_cached(body, PAGE)
    return await with_stale_prefix(body, ask, proxy, PAGE) if is_hit else await ask(body)


@fault(
    "chunk border",
    "The second chunk of a prompt, from token 100 on, reads wrong K and V of the first.",
    "dependence.long_prompt",
)
async def chunk_border(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    return await with_stale_prefix(body, ask, proxy, CHUNK)


@fault(
    "batch dependence",
    "With a second request in the batch, log-probabilities drift.",
    "dependence.batch_mates",
)
async def batch_dependence(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    await asyncio.sleep(GATHER_SECONDS)
    is_batch = proxy.num_in_flight > 1 or len(proxy.prompts(body)) > 1
    reply = await ask(body)
    if is_batch:
        each_choice(reply, drifted)
    return reply


@fault(
    "concurrency dependence",
    "With three requests in flight, an answer is that of another prompt.",
    "dependence.concurrency",
)
async def concurrency_dependence(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    await asyncio.sleep(GATHER_SECONDS)
    if proxy.num_in_flight >= 3 and "prompt" in body:
        prompts = proxy.prompts(body)
        return await ask({**body, "prompt": [[*prompt[:-1], OTHER_TOKEN] for prompt in prompts]})
    return await ask(body)


@fault(
    "prefix cache",
    "After a prefix-cache hit of 8 tokens or more, log-probabilities drift.",
    "dependence.prefix_cache",
)
async def prefix_cache(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    is_hit = proxy.has_cached(body, 8)
    reply = await ask(body)
    if is_hit:
        each_choice(reply, drifted)
    return reply


@changes_reply("truncated logprobs", "The list of log-probabilities lacks its last entry.", "scoring.entries")
def truncated_logprobs(body: Body, reply: Reply) -> None:
    each_choice(reply, lambda entries: entries[:-1])


@changes_reply("rounded logprobs", "Log-probabilities have one digit behind the point.", "scoring.prompt")
def rounded_logprobs(body: Body, reply: Reply) -> None:
    def rounded(entries: list[Entry]) -> list[Entry]:
        return [
            Entry(
                entry.token,
                None if entry.logprob is None else round(entry.logprob, 1),
                None if entry.top is None else [(token, round(value, 1)) for token, value in entry.top],
            )
            for entry in entries
        ]

    each_choice(reply, rounded)


@changes_reply(
    "low logprobs",
    "Log-probabilities are too low: the softmax sums over padding too.",
    "scoring.continuation",
)
def low_logprobs(body: Body, reply: Reply) -> None:
    each_choice(reply, drifted)


@fault(
    "softmax temperature",
    "Log-probabilities are those of a softmax with temperature 0.7.",
    "scoring.continuation",
)
async def softmax_temperature(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    temperature = 0.7
    is_chat = "messages" in body
    name = "top_logprobs" if is_chat else "logprobs"
    num_top = body.get(name) or 0
    if not body.get("logprobs") and (is_chat or body.get("logprobs") is None):
        return await ask(body)
    reply = await ask({**body, name: 20})  # the tail beyond 20 hardly counts in the sum

    def colder(entries: list[Entry]) -> list[Entry]:
        return [_colder(entry, temperature, num_top) for entry in entries]

    if reply.status == 200:
        each_choice(reply, colder)
    return reply


def _colder(entry: Entry, temperature: float, num_top: int) -> Entry:
    if entry.logprob is None or not entry.top:
        return entry
    total = math.log(sum(math.exp(value / temperature) for _, value in entry.top))
    top = [(token, value / temperature - total) for token, value in entry.top[:num_top]]
    chosen = (entry.token, entry.logprob / temperature - total)
    return Entry(entry.token, chosen[1], top if chosen[0] in dict(top) else [*top, chosen])


@changes_reply("no chosen token", "top_logprobs lack the chosen token.", "sampling.top_logprobs")
def no_chosen_token(body: Body, reply: Reply) -> None:
    def without(entries: list[Entry]) -> list[Entry]:
        return [
            entry
            if entry.top is None
            else replace(entry, top=[(token, value) for token, value in entry.top if token != entry.token])
            for entry in entries
        ]

    each_choice(reply, without)


@changes_reply("unsorted top", "top_logprobs begin with the least likely token.", "sampling.top_logprobs")
def unsorted_top(body: Body, reply: Reply) -> None:
    def reverse(entries: list[Entry]) -> list[Entry]:
        return [replace(entry, top=entry.top and entry.top[::-1]) for entry in entries]

    each_choice(reply, reverse)


@changes_reply(
    "unlike values",
    "The chosen token's log-probability is not the one in its top_logprobs.",
    "sampling.top_logprobs",
)
def unlike_values(body: Body, reply: Reply) -> None:
    def unlike(entries: list[Entry]) -> list[Entry]:
        return [
            entry if entry.logprob is None else replace(entry, logprob=entry.logprob - 0.05)
            for entry in entries
        ]

    each_choice(reply, unlike)


@changes_reply("echo off by one", "The echo starts with the second token of the prompt.", "scoring.entries")
def echo_off_by_one(body: Body, reply: Reply) -> None:
    if not body.get("echo"):
        return
    seen: set[int] = set()
    for choice in reply.choices:
        if choice["index"] in seen or not choice["text"]:
            continue
        seen.add(choice["index"])
        entries = entries_of(choice)
        if entries:
            put_entries(choice, entries[1:])
        choice["text"] = choice["text"][1:]
