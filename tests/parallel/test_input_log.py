"""Calls of the scheduler as messages between ranks."""

import msgspec
import pytest

from shared.engine.input_log import Call, decode, encode


def test_a_call_comes_back() -> None:
    call = Call("abort", 1.5, rid="a")
    assert decode(encode(call)) == call


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: encode(Call("abort", 2**70)), "at most 64 bits"),
        (lambda: decode(msgspec.msgpack.encode({"method": "unknown", "now": 0.0})), "Invalid enum value"),
    ],
)
def test_what_is_no_call_is_refused(call, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()
