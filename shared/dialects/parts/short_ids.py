"""Ids of nine letters or digits, which Mistral's chat templates demand."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from typing import Any

LETTERS = string.ascii_letters + string.digits
ID = re.compile("[A-Za-z0-9]{9}")


def new_short_id() -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(9))


def short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls and results have such ids."""
    found = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": as_short_id(call.get("id"))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") is not None:
            message = {**message, "tool_call_id": as_short_id(message["tool_call_id"])}
        found.append(message)
    return found


def as_short_id(call_id: Any) -> str:
    """The id, if templates take it; else one that depends on it alone."""
    text = "" if call_id is None else str(call_id)
    if ID.fullmatch(text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return "".join(LETTERS[number // 62**i % 62] for i in range(9))
