"""Clauses of transports. Both ends are in this process; their pools are those of the reference."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.interfaces import StatePool, Transport
from diptych.shared.loading.sent_pool import SentPool
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.types.attention import FP8

LIMIT = 5.0  # time limit of a room in seconds
NUM_PAGES, NUM_LAYERS, PAGE_SIZE = 12, 3, 4
SOURCE, TARGET = [7, 2, 5], [1, 9, 4]
EVERY = grid(
    "page {page_size}, {dtype}", page_size=(1, PAGE_SIZE), dtype=(torch.float32, torch.bfloat16, FP8)
)


class Pool:
    """A pool that returns its buffers only while the gate is open, so that a copy can be delayed."""

    def __init__(self, page_size: int, dtype: torch.dtype, seed: int) -> None:
        pool = registry.load("memory_pool", "reference").TokenToKVPool
        self.inner = pool(NUM_PAGES * page_size, page_size, NUM_LAYERS, 2, 8, dtype, "cpu")
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def buffers(self) -> list[torch.Tensor]:
        return [get(i) for i in range(NUM_LAYERS) for get in (self.inner.k_buffer, self.inner.v_buffer)]

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        self.is_waiting.set()
        self.gate.wait(2 * LIMIT)
        return self.inner.k_buffer(layer_id)

    def pages(self, pages: list[int]) -> list[torch.Tensor]:
        """Copies of these pages of each buffer."""
        return [buffer.unflatten(0, (-1, self.inner.page_size))[pages].clone() for buffer in self.buffers()]

    def hold(self) -> None:
        self.is_waiting.clear()
        self.gate.clear()


class Ends:
    """A connection: `sender` and `receiver` with their pools."""

    def __init__(self, impl: type[Transport], case: Case | None = None, has_states: bool = False) -> None:
        page_size, dtype = getattr(case, "page_size", PAGE_SIZE), getattr(case, "dtype", torch.float32)
        self.pools = [Pool(page_size, dtype, seed) for seed in (1, 2)]
        with ThreadPoolExecutor(2) as threads:
            sent = map(with_states, self.pools) if has_states else self.pools
            self.sender, self.receiver = threads.map(impl, socket.socketpair(), sent)
        self.source, self.target = self.pools

    def open(self, room: str = "room", target: list[int] = TARGET) -> None:
        self.receiver.open_receiver(room, target)
        self.sender.open_sender(room)

    def final(self, end: Transport, room: str = "room") -> str:
        """Wait for the room's final status; `open` at the time limit."""
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit:
            status = end.poll(room)
            if status != "open":
                return status
            time.sleep(0.001)
        return "open"

    def message(self) -> None:
        """Wait for a message from the sender; everything that it wrote before has then arrived too."""
        self.sender.post(b"x")
        wait_for("a message", lambda: bool(self.receiver.messages()))


def with_states(pool: Any, num_heads: int = 2) -> SentPool:
    """The pool, and random states of 5 rows in two layers."""
    config = LinearAttentionConfig(num_heads, 2 * num_heads, 4, 6, 4)
    states = StatePool(4, 2, config, torch.bfloat16, "cpu")
    for buffer in (states.inputs, states.recurrent):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(id(pool) % 2**31)))
    return SentPool(pool, states=states)


def wait_for(what: str, holds: Any) -> None:
    limit = time.monotonic() + LIMIT
    while not holds():
        expect_true(what, time.monotonic() < limit)
        time.sleep(0.001)


@contextlib.contextmanager
def ends_of(impl: type[Transport], case: Case | None = None, has_states: bool = False) -> Iterator[Ends]:
    ends = Ends(impl, case, has_states)
    try:
        yield ends
    finally:
        for pool in ends.pools:
            pool.gate.set()
        ends.sender.close()
        ends.receiver.close()


@contract("Pages arrive in all layers, at the target pages; nothing else changes.", EVERY)
def pages_arrive(impl: type[Transport], case: Case) -> None:
    with ends_of(impl, case) as ends:
        others = [page for page in range(NUM_PAGES + 1) if page not in TARGET]
        wanted, kept, source = ends.source.pages(SOURCE), ends.target.pages(others), ends.source.pages(others)
        ends.open()
        ends.sender.send("room", SOURCE, TARGET)
        expect_equal("the receiver's room", ends.final(ends.receiver), "done")
        expect_equal("the sender's room", ends.final(ends.sender), "done")
        for found, expected in zip(ends.target.pages(TARGET), wanted):
            expect_equal("target pages", found, expected)
        for found, expected in zip(ends.target.pages(others), kept):
            expect_equal("other pages", found, expected)
        for found, expected in zip(ends.source.pages(others), source):
            expect_equal("the sender's pages", found, expected)


@contract("A state arrives with the pages, in all layers, at the target row, and nowhere else.", EXAMPLE)
def states_arrive(impl: type[Transport], case: Case) -> None:
    with ends_of(impl, has_states=True) as ends:
        source, target = (end.kv_pool.states for end in (ends.sender, ends.receiver))  # type: ignore[attr-defined]
        wanted = [buffer.clone() for buffer in (target.inputs, target.recurrent)]
        for buffer, own in zip(wanted, (source.inputs, source.recurrent)):
            buffer[:, 3] = own[:, 1]
        ends.receiver.open_receiver("room", TARGET, 3)
        ends.sender.open_sender("room")
        ends.sender.send("room", SOURCE, TARGET, 1, 3)
        expect_equal("the receiver's room", ends.final(ends.receiver), "done")
        for name, found, expected in zip(("inputs", "states"), (target.inputs, target.recurrent), wanted):
            expect_equal(name, found, expected)
        for pages, expected in zip(ends.target.pages(TARGET), ends.source.pages(SOURCE)):
            expect_equal("target pages", pages, expected)


@contract("Several rooms at a time; a name may be used again.", EXAMPLE)
def several_rooms(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        for _ in range(2):
            for i in range(4):
                ends.open(str(i), [1 + 2 * i, 2 + 2 * i])
            for i in (2, 0, 3, 1):
                ends.sender.send(str(i), [11 - i, 5], [1 + 2 * i, 2 + 2 * i])
            for i in range(4):
                expect_equal("the receiver's room", ends.final(ends.receiver, str(i)), "done")
                expect_equal("the sender's room", ends.final(ends.sender, str(i)), "done")
                wanted = ends.source.pages([11 - i, 5])
                for found, expected in zip(ends.target.pages([1 + 2 * i, 2 + 2 * i]), wanted):
                    expect_equal(f"pages of room {i}", found, expected)


@contract("`send` returns before the copy; a room is open until then, and is forgotten afterwards.", EXAMPLE)
def open_until_written(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        ends.open()
        ends.source.hold()
        ends.sender.send("room", SOURCE, TARGET)
        wait_for("the copy begins", ends.source.is_waiting.is_set)
        for end in (ends.sender, ends.receiver):
            expect_equal("a room during the copy", end.poll("room"), "open")
        ends.source.gate.set()
        for end in (ends.sender, ends.receiver):
            expect_equal("a room afterwards", ends.final(end), "done")
            expect_raises("a room that has ended", KeyError, end.poll, "room")


ABORTS = table(
    "by moment",
    ("the receiver, before the sender knows", "receiver", "unknown"),
    ("the receiver, before send", "receiver", "opened"),
    ("the receiver, during the copy", "receiver", "copying"),
    ("the sender, before send", "sender", "opened"),
    ("the sender, during the copy", "sender", "copying"),
    ("both, during the copy", "both", "copying"),
    ("both, before send", "both", "opened"),
)


@contract("After `abort` a room stays open while a copy is under way, and fails at both ends.", ABORTS)
def aborted(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        ends.receiver.open_receiver("room", TARGET)
        if case.moment == "unknown":
            ends.receiver.abort("room")
            ends.receiver.post(b"x")
            wait_for("a message", lambda: bool(ends.sender.messages()))
        ends.sender.open_sender("room")
        if case.moment == "copying":
            ends.source.hold()
            ends.sender.send("room", SOURCE, TARGET)
            wait_for("the copy begins", ends.source.is_waiting.is_set)
        if case.moment != "unknown":
            for name in ("sender", "receiver") if case.by == "both" else (case.by,):
                getattr(ends, name).abort("room")
        if case.moment == "copying":
            time.sleep(0.02)
            for end in (ends.sender, ends.receiver):
                expect_equal("a room during the copy", end.poll("room"), "open")
            ends.source.gate.set()
        else:
            ends.sender.send("room", SOURCE, TARGET)
        for end in (ends.sender, ends.receiver):
            expect_equal("a room", ends.final(end), "failed")
        kept = ends.target.pages(TARGET)
        ends.message()
        for found, expected in zip(ends.target.pages(TARGET), kept):
            expect_equal("pages after the end", found, expected)
        ends.open()  # the name can be used again
        ends.sender.send("room", SOURCE, TARGET)
        expect_equal("the next room", (ends.final(ends.receiver), ends.final(ends.sender)), ("done", "done"))


@contract("`abort` has no effect on a room that is done, or not known.", EXAMPLE)
def aborted_late(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        ends.open()
        ends.sender.send("room", SOURCE, TARGET)
        expect_equal("the receiver's room", ends.final(ends.receiver), "done")
        ends.receiver.abort("room")
        expect_equal("the sender's room", ends.final(ends.sender), "done")
        ends.sender.abort("room")  # not before: what it asks may arrive when the next room has this name
        ends.open()
        ends.sender.send("room", SOURCE, TARGET)
        expect_equal("the next room", (ends.final(ends.receiver), ends.final(ends.sender)), ("done", "done"))


@contract(
    "When an end closes, open rooms fail at both ends, and new ones at once.",
    grid("{end}", end=("sender", "receiver")),
)
def lost(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        ends.open()
        getattr(ends, case.end).close()
        for end in (ends.sender, ends.receiver):
            expect_equal("a room", ends.final(end), "failed")
            expect_true("the connection is lost", end.is_lost)
        ends.open("later")
        ends.sender.send("later", SOURCE, TARGET)
        for end in (ends.sender, ends.receiver):
            expect_equal("a room afterwards", ends.final(end, "later"), "failed")


@contract("An end that closes finishes the copy under way first.", EXAMPLE)
def closes_behind_a_copy(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        ends.open()
        ends.source.hold()
        ends.sender.send("room", SOURCE, TARGET)
        wait_for("the copy begins", ends.source.is_waiting.is_set)
        closing = threading.Thread(target=ends.sender.close)
        closing.start()
        time.sleep(0.02)
        expect_equal("the receiver's room during the copy", ends.receiver.poll("room"), "open")
        ends.source.gate.set()
        closing.join()
        expect_equal("the receiver's room", ends.final(ends.receiver), "failed")


@contract("Messages arrive in order, both ways, once each.", EXAMPLE)
def messages_in_order(impl: type[Transport], case: Case) -> None:
    with ends_of(impl) as ends:
        sent = [b"", b"a" * 100_000, *(str(i).encode() for i in range(50))]
        for end, other in ((ends.sender, ends.receiver), (ends.receiver, ends.sender)):
            for message in sent:
                end.post(message)
            found: list[bytes] = []
            limit = time.monotonic() + LIMIT
            while len(found) < len(sent) and time.monotonic() < limit:
                found += other.messages()
            expect_equal("messages", found, sent)
            expect_equal("messages again", other.messages(), [])


@contract(
    "Pools with pages or states of another shape or dtype are a ValueError at both ends.",
    table(
        "page_size dtype num_heads",
        ("page size", 1, torch.float32, 0),
        ("dtype", PAGE_SIZE, torch.float16, 0),
        ("states", PAGE_SIZE, torch.float32, 4),
    ),
)
def other_pages(impl: type[Transport], case: Case) -> None:
    with ThreadPoolExecutor(2) as threads:
        ours: Any = Pool(PAGE_SIZE, torch.float32, 1)
        theirs: Any = Pool(case.page_size, case.dtype, 2)
        if case.num_heads:
            ours, theirs = with_states(ours), with_states(theirs, case.num_heads)
        found = [threads.submit(impl, end, pool) for end, pool in zip(socket.socketpair(), (ours, theirs))]
        for one in found:
            expect_true("a ValueError", isinstance(one.exception(LIMIT), ValueError), one.exception())
