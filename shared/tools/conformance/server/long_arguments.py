"""Check that long arguments of a call stream at a constant rate, and other requests go on meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from diptych.shared.tools.conformance.server.checks import Context, Finding, Status, check
from diptych.shared.tools.conformance.server.client import Refused, Unreachable
from diptych.shared.tools.conformance.server.conversations import Talk
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.semantics import CHAT, MESSAGES, post
from diptych.shared.tools.conformance.server.tool_answers import NoCalls, demand, demanded

LONGEST = 128 * 1024
ITEM = "one two three four five six seven eight nine ten"
MOST_SLOWER = 2.5
"""Of the last quarter against the first half. Reading the text again at each token gives 3.5; attention over
a longer text, and load, stay below."""
MOST_STALLED = 20.0
"""Time of a short request beside the long one against its time alone."""
TRIES = 3


class Timed(NamedTuple):
    """Seconds and characters so far, at each chunk with arguments; and the times of short requests."""

    marks: list[tuple[float, int]]
    arguments: str
    beside: list[float]

    @property
    def slowdown(self) -> float:
        """Seconds for a character in the last quarter, over those in the first half."""
        total = self.marks[-1][1]
        at = [next(t for t, n in self.marks if n >= share * total) for share in (0.02, 0.5, 0.75, 1.0)]
        first = (at[1] - at[0]) / (0.48 * total)
        return ((at[3] - at[2]) / (0.25 * total)) / max(first, 1e-9)


def long_talk(num_items: int) -> Talk:
    items = {"type": "array", "items": {"const": ITEM}, "minItems": num_items, "maxItems": num_items}
    schema = {
        "type": "object",
        "properties": {"x": items},
        "required": ["x"],
        "additionalProperties": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "store", "parameters": schema}}
    return Talk([{"role": "user", "content": "Store the text."}], [tool], ("store", {}))


def short_request(context: Context) -> float:
    begin = time.perf_counter()
    post(context, CHAT, messages=MESSAGES, max_tokens=2)
    return time.perf_counter() - begin


def stream_timed(context: Context, talk: Talk, max_tokens: int) -> Timed:
    """Stream a demanded call, with short requests beside it."""
    assert context.call_mode is not None
    body: dict[str, Any] = {
        "model": context.server.model, "messages": talk.messages, "tools": talk.tools, "temperature": 0,
        "max_tokens": max_tokens, "stream": True, **demanded(talk, context.call_mode),
    }  # fmt: skip
    marks: list[tuple[float, int]] = []
    text, beside = "", []
    with ThreadPoolExecutor(1) as pool:
        pending = None
        try:
            with context.server.http.stream("POST", CHAT, json=body) as response:
                if response.status_code != 200:
                    raise Refused(response.status_code, response.read().decode(errors="replace"))
                for line in response.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    for choice in json.loads(line[5:]).get("choices") or ():
                        for piece in (choice.get("delta") or {}).get("tool_calls") or ():
                            text += (piece.get("function") or {}).get("arguments") or ""
                    marks.append((time.perf_counter(), len(text)))
                    if pending is None and text:
                        pending = pool.submit(short_request, context)
        except (httpx.TransportError, httpx.StreamError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        if pending is not None:
            beside.append(pending.result())
    return Timed(marks, text, beside)


@check(
    "tools.long",
    "Long arguments stream at a constant rate, and do not hold up other requests.",
    "A parser that reads its text again at each token takes minutes for a file of 128 KiB.",
)
def long(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None or not context.offers.stream:
        yield missing or Finding("not offered", context.offers.reason("stream"))
        return
    oracle = context.oracle
    per_item = len(oracle.tokenizer.encode(json.dumps(ITEM) + ",", add_special_tokens=False))
    num_tokens = min(oracle.context_len // 2, context.limits.long_call)
    num_items = max(4, min(num_tokens // per_item, LONGEST // (len(ITEM) + 3) + 1))
    talk = long_talk(num_items)
    try:
        demand(context, long_talk(1))
        alone = min(short_request(context) for _ in range(2))
        best: Timed | None = None
        for _ in range(TRIES):
            timed = stream_timed(context, talk, num_items * (per_item + 2) + 60)
            if not timed.marks or len(timed.arguments) < num_items * len(ITEM):
                yield Finding("not offered", f"the arguments end after {len(timed.arguments)} characters")
                return
            best = timed if best is None or timed.slowdown < best.slowdown else best
            if best.slowdown <= MOST_SLOWER and min(best.beside, default=0.0) <= MOST_STALLED * alone + 1.0:
                break
    except (NoCalls, Refused) as error:
        if isinstance(error, Refused) and error.status >= 500:
            raise
        yield Finding("not offered", str(error))
        return
    assert best is not None, "a server is tried at least once"
    num = len(best.arguments)
    evidence = {"characters": num, "seconds": round(best.marks[-1][0] - best.marks[0][0], 3)}
    status: Status = "fails" if best.slowdown > MOST_SLOWER else "holds"
    what = f"time of a character at the end of {num} characters of arguments, against the beginning"
    yield Finding(status, what, f"at most {MOST_SLOWER} times", round(best.slowdown, 2), evidence)
    beside = min(best.beside, default=0.0)
    status = "fails" if beside > MOST_STALLED * alone + 1.0 else "holds"
    yield Finding(status, "seconds of a short request beside it", round(alone, 3), round(beside, 3))
