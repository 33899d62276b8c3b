"""Check that long arguments of a call stream at a constant rate, and other requests go on meanwhile."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from diptych.shared.tools.conformance.server.checks import Context, Finding, Status, check
from diptych.shared.tools.conformance.server.client import Malformed, Refused, Unreachable
from diptych.shared.tools.conformance.server.conversations import Talk
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.semantics import CHAT, MESSAGES, post
from diptych.shared.tools.conformance.server.tool_answers import NoCalls, demand, demanded

LONGEST = 128 * 1024
ITEM = "one two three four five six seven eight nine ten"
PER_ITEM = 16
"""Long tokens of an item."""
PLAIN = re.compile(r"[\w*.#~=-]+", re.ASCII)
MOST_SLOWER = 2.5
"""Of the last quarter against the first half, or against a short call behind as many tokens: attention over a
longer text is slower too. Reading the text again at each token gives 3.5."""
MOST_STALLED = 20.0
"""Time of a short request beside the long one against its time alone."""
MANY = 1000
"""Tokens over which attention may matter."""
TRIES = 3
LONGEST_SECONDS = 600.0
"""Of one stream. What has come by then is judged."""


LEAST_PIECES = 8
"""Of a stream whose rate is measured."""


class Timed(NamedTuple):
    """Seconds and characters so far, at each chunk with arguments; and the times of short requests."""

    marks: list[tuple[float, int]]
    arguments: str
    beside: list[float]
    num_tokens: int = 0
    is_cut: bool = False  # it was ended by the time

    def seconds(self, begin: float, end: float) -> float:
        """A character takes so many, between these shares of the text."""
        total = self.marks[-1][1]
        first, last = (next(t for t, n in self.marks if n >= share * total) for share in (begin, end))
        return max((last - first) / ((end - begin) * total), 1e-9)

    def slowdown(self, behind: float = 0.0) -> float:
        """Seconds for a character in the last quarter, over those in the first half or of another call."""
        return self.seconds(0.75, 1.0) / max(self.seconds(0.02, 0.5), behind)


def long_token(oracle: Oracle) -> str:
    """The longest token that JSON writes as it is, and that stays one token beside itself."""
    ids = {oracle.tokenizer.decode([token_id]): token_id for token_id in range(oracle.vocab_size)}
    for text in sorted(filter(PLAIN.fullmatch, ids), key=len, reverse=True):
        if oracle.tokenizer.encode(text * 4, add_special_tokens=False) == [ids[text]] * 4:
            return text
    return "one"


def long_talk(num_items: int, item: str = ITEM, prompt: str = "Store the text.") -> Talk:
    items = {"type": "array", "items": {"const": item}, "minItems": num_items, "maxItems": num_items}
    schema = {
        "type": "object",
        "properties": {"x": items},
        "required": ["x"],
        "additionalProperties": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "store", "parameters": schema}}
    return Talk([{"role": "user", "content": prompt}], [tool], ("store", {}))


def short_request(context: Context) -> float:
    begin = time.perf_counter()
    post(context, CHAT, messages=MESSAGES, max_tokens=2)
    return time.perf_counter() - begin


def stream_timed(context: Context, talk: Talk, max_tokens: int, seconds: float = LONGEST_SECONDS) -> Timed:
    """Stream a demanded call, with a short request beside it."""
    assert context.call_mode is not None
    body: dict[str, Any] = {
        "model": context.server.model, "messages": talk.messages, "tools": talk.tools, "temperature": 0,
        "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True},
        **demanded(talk, context.call_mode),
    }  # fmt: skip
    marks: list[tuple[float, int]] = []
    text, beside, num_tokens, is_cut = "", [], 0, False
    ends_at = time.perf_counter() + seconds
    with ThreadPoolExecutor(1) as pool:
        pending = None
        try:
            with context.server.http.stream("POST", CHAT, json=body) as response:
                if response.status_code != 200:
                    raise Refused(response.status_code, response.read().decode(errors="replace"))
                for line in response.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    try:
                        chunk = json.loads(line[5:])
                    except ValueError as error:
                        raise Malformed(f"a chunk that is no JSON ({error})", line) from None
                    num_tokens = (chunk.get("usage") or {}).get("completion_tokens") or num_tokens
                    for choice in chunk.get("choices") or ():
                        for piece in (choice.get("delta") or {}).get("tool_calls") or ():
                            text += (piece.get("function") or {}).get("arguments") or ""
                    marks.append((time.perf_counter(), len(text)))
                    if pending is None and text:
                        pending = pool.submit(short_request, context)
                    if is_cut := marks[-1][0] > ends_at:
                        break
        except (httpx.TransportError, httpx.StreamError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        if pending is not None:
            beside.append(pending.result())
    return Timed(marks, text, beside, num_tokens or len(marks), is_cut)


def best_item(context: Context, seconds: float) -> tuple[str, float]:
    """Words; or one long token, if the model then writes far more characters for each token: 128 KiB are few
    tokens, and a computer without a GPU gets there. And this number of characters."""
    rates = {}
    for item in (ITEM, long_token(context.oracle) * PER_ITEM):
        timed = stream_timed(context, long_talk(4, item), 256, seconds)
        rates[item] = len(timed.arguments) / max(timed.num_tokens, 1)
    words, tokens = rates
    item = tokens if rates[tokens] > 4 * rates[words] else words
    return item, max(rates[item], 1.0)


def seconds_behind(context: Context, item: str, num_tokens: int, seconds: float) -> float:
    """A character of a short call takes so many, behind a prompt of so many tokens."""
    tokenizer = context.oracle.tokenizer
    ids = tokenizer.encode(f"{ITEM} " * (num_tokens // 8), add_special_tokens=False)[:num_tokens]
    talk = long_talk(8, item, tokenizer.decode(ids) + "\nStore the text.")
    timed = stream_timed(context, talk, 256, seconds)
    return timed.seconds(0.02, 1.0) if timed.arguments else 0.0


@check(
    "tools.long",
    "Long arguments stream at a constant rate, and do not hold up other requests.",
    "A parser that reads its text again at each token takes minutes for a file of 128 KiB.",
)
def long(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None or not context.offers.stream:
        yield missing or Finding("not offered", context.offers.reason("stream"))
        return
    seconds = min(LONGEST_SECONDS, (context.server.ends_at - time.monotonic()) / (3 * TRIES))
    behind = 0.0
    try:
        demand(context, long_talk(1))
        item, rate = best_item(context, seconds / 4)
        num_tokens = min(context.oracle.context_len // 2, context.limits.long_call)
        num_items = max(4, -int(-min(LONGEST, num_tokens * rate) // (len(item) + 4)))
        max_tokens = int(1.25 * num_items * (len(item) + 4) / rate) + 128
        alone = min(short_request(context) for _ in range(2))
        best: Timed | None = None
        for _ in range(TRIES):
            timed = stream_timed(context, long_talk(num_items, item), max_tokens, seconds)
            if not timed.arguments or not (timed.is_cut or len(timed.arguments) >= num_items * len(item)):
                yield Finding("not offered", f"the arguments end after {len(timed.arguments)} characters")
                return
            if (num_pieces := len({n for _, n in timed.marks})) < LEAST_PIECES:
                yield Finding("not offered", f"the arguments come in {num_pieces} pieces: no rate is seen")
                return
            best = timed if best is None or timed.slowdown() < best.slowdown() else best
            if best.slowdown() <= MOST_SLOWER and min(best.beside, default=0.0) <= MOST_STALLED * alone + 1.0:
                break
        assert best is not None, "a server is tried at least once"
        if best.slowdown() > MOST_SLOWER and best.num_tokens > MANY:
            behind = seconds_behind(context, item, best.num_tokens, seconds)
    except (NoCalls, Refused) as error:
        if isinstance(error, Refused) and error.status >= 500:
            raise
        yield Finding("not offered", str(error))
        return
    num, slowdown = len(best.arguments), best.slowdown(behind)
    evidence = {
        "characters": num,
        "tokens": best.num_tokens,
        "seconds": round(best.marks[-1][0] - best.marks[0][0], 3),
    }
    status: Status = "fails" if slowdown > MOST_SLOWER else "holds"
    end = f", where {seconds:.0f} s were over" if best.is_cut else ""
    what = f"time of a character at the end of {num} characters of arguments{end}, against the beginning"
    yield Finding(status, what, f"at most {MOST_SLOWER} times", round(slowdown, 2), evidence)
    beside = min(best.beside, default=0.0)
    status = "fails" if beside > MOST_STALLED * alone + 1.0 else "holds"
    yield Finding(status, "seconds of a short request beside it", round(alone, 3), round(beside, 3))
