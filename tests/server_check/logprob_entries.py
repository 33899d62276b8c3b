"""The log-probabilities of an answer's choice, in one form for completions and chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Entry:
    """One token. `top`: (token, logprob) as the server ordered them."""

    token: str
    logprob: float | None
    top: list[tuple[str, float]] | None


def entries_of(choice: dict[str, Any]) -> list[Entry]:
    """Entries of a choice or a streamed piece of one; none if it has no log-probabilities."""
    found = choice.get("logprobs")
    if not found:
        return []
    if "content" in found:
        return [
            Entry(
                each["token"],
                each["logprob"],
                [(top["token"], top["logprob"]) for top in each["top_logprobs"]],
            )
            for each in found["content"] or []
        ]
    tops = [None if top is None else list(top.items()) for top in found["top_logprobs"]]
    return [Entry(*each) for each in zip(found["tokens"], found["token_logprobs"], tops)]


def put_entries(choice: dict[str, Any], entries: list[Entry]) -> None:
    """Write changed entries back. There may be fewer than there were: the last ones, or those cut off in
    front, are lost."""
    found = choice["logprobs"]
    if "content" in found:
        found["content"] = [
            {
                **old,
                "logprob": entry.logprob,
                "top_logprobs": [{"token": token, "logprob": value} for token, value in entry.top or []],
            }
            for old, entry in zip(found["content"], entries)
        ]
        return
    found["tokens"] = [entry.token for entry in entries]
    found["token_logprobs"] = [entry.logprob for entry in entries]
    found["top_logprobs"] = [None if entry.top is None else dict(entry.top) for entry in entries]
    found["text_offset"] = found["text_offset"][: len(entries)]
