"""Why a request ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class FinishReason:
    """Base of the reasons below; `kind` is the word in the response to a client."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class FinishLength(FinishReason):
    """The request reached its limit (`max_new_tokens`, or the context is full)."""

    length: int  # output tokens
    kind: ClassVar[str] = "length"


@dataclass(frozen=True)
class FinishToken(FinishReason):
    """A stop token or an end-of-sequence token was produced; it is the last of the request's output ids."""

    token_id: int
    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class FinishString(FinishReason):
    """A stop string occurs in the text."""

    matched: str
    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class FinishRegex(FinishReason):
    """A stop regex matches in the text; `matched` is the text that it matched."""

    pattern: str
    matched: str
    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class FinishAbort(FinishReason):
    """Ended from outside: an abort, a closed connection, a timeout, or a full queue."""

    message: str
    status: int = 499  # the HTTP status of the response
    kind: ClassVar[str] = "abort"


@dataclass(frozen=True)
class FinishError(FinishReason):
    """No token could be sampled: the logits held NaN, or the request bans every token (status 400)."""

    message: str
    status: int = 500
    kind: ClassVar[str] = "error"
