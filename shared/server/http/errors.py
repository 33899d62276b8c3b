"""Errors as clients see them: OpenAI's error object or Anthropic's, with an HTTP status."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from diptych.shared.server.http.limits import MAX_FIELD_CHARS, MAX_MESSAGE_CHARS

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    **_TYPES,
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
"""As each API documents them; others are invalid_request_error below 500."""


class RequestName(NamedTuple):
    """What an error says of the request that it answers."""

    id: str
    path: str


REQUEST: ContextVar[RequestName | None] = ContextVar("request", default=None)
"""Of the request that this task answers."""

ANTHROPIC_PATH = "/v1/messages"
THREAD = "thread"
"""A field of Anthropic's API. From the details of the error its client knows that the server stores no
conversation, and sends the whole one."""

RETRY_AFTER_SECONDS = 1
"""What a client is asked to wait when the server is full or draining."""


class ApiError(Exception):
    """An answer other than 200. `param`: the field of the body that is wrong. `anthropic_message`: the words
    by which clients of Anthropic's API recognize the error."""

    anthropic_message: str | None = None

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """A full or draining server says when to try again. Nothing else is read from a client whose body
        did not arrive."""
        if self.status == 408:
            return {"Connection": "close"}
        return {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """OpenAI's `{"error": {message, type, param, code}}` with Anthropic's `type` and `request_id` beside
        it. Requests of Anthropic's API get its types and words."""
        name = REQUEST.get()
        is_anthropic = name is not None and name.path.startswith(ANTHROPIC_PATH)
        message, types, defect = self.message, _TYPES, "server_error"
        if is_anthropic:
            message, types, defect = self.anthropic_message or message, _ANTHROPIC_TYPES, "api_error"
        error: dict[str, Any] = {
            "message": message,
            "type": types.get(self.status, defect if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        if is_anthropic and self.param == THREAD:
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return {"type": "error", "error": error, "request_id": name.id if name is not None else None}


class ContextOverflow(ApiError):
    """400 for a prompt that the context cannot hold, or not together with its longest answer, in the words by
    which clients recognize it: they shorten the conversation or the answer."""

    def __init__(
        self, num_prompt: int, limit: int, param: str, max_tokens: int | None = None, size: str = ""
    ) -> None:
        """num_prompt: tokens, at least. max_tokens: of the answer, where the prompt alone fits. size: of the
        prompt, in words."""
        if max_tokens is None:
            asked, what = f"your prompt has {size}", "prompt"
            said = f"prompt is too long: {num_prompt} tokens > {limit} maximum"
        else:
            parts = f"{num_prompt} in the prompt, {max_tokens} in the completion"
            asked, what = f"you requested {num_prompt + max_tokens} tokens ({parts})", "prompt or completion"
            said = (
                f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {limit}, "
                "decrease input length or `max_tokens` and try again"
            )
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, {asked}. "
            f"Please reduce the length of the {what}.",
            param=param,
            code="context_length_exceeded",
        )
        self.anthropic_message = said


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request can never succeed as it is."""
    return ApiError(400, message, param=param)


def first_word(error: ValueError) -> str:
    """Return the name of a parameter with which the message begins."""
    match = re.match(r"\w+", str(error))
    return match[0] if match else ""


@contextlib.contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors about these fields name those of another body: field -> field from which it was made."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            error.param = fields.get(error.param, error.param)
        raise


# ---- what pydantic finds ----


def invalid_body(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """400 that names the wrong field: of the forms that a field may have, the one that was matched deepest,
    and of those one that has the right type."""
    place, value, error = max(
        ((*_place_of(each, body), each) for each in errors),
        key=lambda found: (len(found[0]), not found[2]["type"].endswith("_type")),
    )
    field = ".".join(place)[:MAX_FIELD_CHARS]
    if error["type"] == "extra_forbidden":
        message = f"unknown field {field!r}"
    elif error["type"] == "refused_field":
        message = f"{field!r} is not supported: {error['msg']}"
    elif error["type"] == "json_invalid":
        field, message = "", "the body is not valid JSON"
    else:
        said = _message_of(error)
        if error["type"] == "literal_error" and isinstance(value, str):
            said += f", got {value[:MAX_FIELD_CHARS]!r}"
        message = f"{field}: {said}" if field else said
    return bad_request(message, field or None)


def _place_of(error: Mapping[str, Any], body: Any) -> tuple[list[str], Any]:
    """Keys and indices of the body, and the value there. Pydantic's place also has the forms that were tried:
    names of types, and values of `type`."""
    root, *loc = error["loc"]
    if root != "body":
        return [*map(str, loc)], None
    place: list[str] = []
    for part, following in zip(loc, [*loc[1:], None]):
        if _has(body, part):
            if isinstance(body, dict) and part == body.get("type") and following in body:
                continue
            body = body[part]
        elif following is not None or error["type"] != "missing":
            continue
        place.append(str(part))
    return place, body


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)


def _message_of(error: Mapping[str, Any]) -> str:
    """Pydantic's, without names of our classes and functions."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("model_type", "model_attributes_type"):
        return "Input should be an object"
    if kind == "union_tag_not_found":
        return "Input should be an object with a type"
    if kind == "union_tag_invalid":
        return f"type {context['tag']!r} is none of {context['expected_tags']}"
    return str(error["msg"])
