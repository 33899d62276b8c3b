"""Errors as clients see them: OpenAI's error object, with an HTTP status."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}

RETRY_AFTER_SECONDS = 1
"""What a client is asked to wait when the server is full or draining."""


class ApiError(Exception):
    """An answer other than 200. `param`: the field of the body that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """A full or draining server says when to try again."""
        return {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """OpenAI's `{"error": {message, type, param, code}}`, and Anthropic's `type` beside it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "type": "error",
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request can never succeed as it is."""
    return ApiError(400, message, param=param)
