"""Frames and requests that are nearly right, for a time: 4 seconds in all; in the whole run HTTP has ten
minutes, and so have the channels.

    python -m tests.fuzz.test_fuzz 1200 [SEED]

prints a table of what a run has done.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from diptych.reference.parallel.shared_memory_transport import SharedMemoryTransport
from diptych.reference.parallel.transport import Transport
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.text.tokenizer import Tokenizer
from tests.fuzz import channels, requests
from tests.grammar.test_compiler import make

SHORT, LONG = 4.0, 1200.0
"""Seconds of all targets together, half of them for HTTP."""


def grammar_worker() -> Any:
    return channels.grammar_worker(make(Tokenizer.from_pretrained(ASSETS / "tiny-dense")))


def alone(case: Callable[[random.Random], None]) -> Any:
    return lambda: (case, lambda: None)


TARGETS: dict[str, tuple[float, Callable[[], Any]]] = {  # with the share of the time
    "HTTP: bodies by size": (0.3, requests.application),
    "HTTP: paths, headers and methods": (0.1, requests.router),
    "HTTP: bytes of a connection": (0.1, requests.bytes_of_requests),
    **{name: (0.02, alone(channels.reader(name))) for name in channels.READERS},
    "frames of a channel": (0.04, alone(channels.frames)),
    "handshakes": (0.05, channels.handshakes),
    "frames with codes": (0.05, channels.proved_frames),
    "KV pages": (0.06, alone(channels.pages(Transport))),
    "KV pages in shared memory": (0.06, alone(channels.pages(SharedMemoryTransport))),
    "grammar worker": (0.08, grammar_worker),
}


def fuzz(name: str, seconds: float, seed: int) -> int:
    """Run cases of a target; returns their number."""
    case, close = TARGETS[name][1]()
    rng, number, end = random.Random(f"{name} {seed}"), 0, time.monotonic() + seconds
    try:
        with channels.quiet():
            while number == 0 or time.monotonic() < end:
                case(rng)
                number += 1
    finally:
        close()
    return number


@pytest.mark.parametrize(
    "seconds", [SHORT, pytest.param(LONG, marks=pytest.mark.full)], ids=["short", "long"]
)
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_right_is_refused(name: str, seconds: float) -> None:
    assert fuzz(name, seconds * TARGETS[name][0], seed=0) > 0


def test_the_shares_are_the_whole_time() -> None:
    assert sum(share for share, _ in TARGETS.values()) == pytest.approx(1)
    assert sum(share for name, (share, _) in TARGETS.items() if "HTTP" in name) == pytest.approx(0.5)


def main(seconds: float, seed: int = 0) -> None:
    for name, (share, _) in TARGETS.items():
        start = time.monotonic()
        number = fuzz(name, seconds * share, seed)
        print(f"| {name} | {number:,} | {time.monotonic() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]))
