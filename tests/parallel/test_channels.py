"""Strangers at the channels between processes: refused, and the processes go on or end with one error."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from diptych.reference.parallel.shared_memory_transport import (
    Memory,
    Place,
    SharedMemoryTransport,
    SharedPool,
)
from diptych.reference.parallel.transport import Frame, Transport
from diptych.shared.config import EngineConfig
from diptych.shared.engine.processes import cluster_secret, launcher
from diptych.shared.engine.processes.child import Child, EngineProcessEnded, Inbox
from diptych.shared.parallel import channel, meeting
from diptych.shared.parallel.channel import MIN_SECRET_BYTES, VERSION, Channel, Listener, Refused, connect
from diptych.shared.parallel.tensor_frames import pack, unpack
from diptych.shared.tools.conformance.contracts.transport.transfers import Pool

SECRET = b"s" * MIN_SECRET_BYTES
SECONDS = 20.0
LENGTH = struct.Struct("!I")


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", SECRET)
    yield found
    found.close()


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


STRANGERS: dict[str, bytes] = {
    "nothing": b"",
    "garbage": os.urandom(200),
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "a huge length": b"\xff\xff\xff\xff" * 3,
    "another version": frame(b"diptych channel 0\n" + bytes(32)),
    "no proof": frame(VERSION + bytes(32)),
    "a wrong proof": frame(VERSION + bytes(32)) + frame(bytes(32)),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_that_connects_first_is_refused(
    kind: str, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 3.0)
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(STRANGERS[kind])
        ours = connect("127.0.0.1", listener.port, SECRET)  # it does not wait for the stranger
        theirs = listener.accept(SECONDS)
        theirs.send(b"a", b"")
        assert [ours.receive(), ours.receive()] == [b"a", b""]
        stranger.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):  # the greeting, then the end
                pass
    assert listener._proved.empty()
    for each in (ours, theirs):
        each.close()


def test_a_wrong_secret_is_refused_at_both_ends(listener: Listener) -> None:
    with pytest.raises(Refused, match="does not prove the same secret"):
        connect("127.0.0.1", listener.port, b"t" * MIN_SECRET_BYTES)
    assert listener._proved.empty()


def test_what_a_stranger_reflects_is_no_proof(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger, contextlib.suppress(OSError):
        while data := stranger.recv(1000):
            stranger.sendall(data)
    assert listener._proved.empty()


def proved_pair(listener: Listener) -> tuple[Channel, Channel]:
    return connect("127.0.0.1", listener.port, SECRET), listener.accept(SECONDS)


@pytest.mark.parametrize("change", ["one bit", "repeated", "left out", "without a code"])
def test_frames_of_others_are_refused(change: str, listener: Listener) -> None:
    ours, theirs = proved_pair(listener)
    sent: list[bytes] = []
    real, recorder = ours.connection, socket.socketpair()
    ours.connection = recorder[0]
    for data in (b"first", b"second"):
        ours.send(data)
        sent.append(recorder[1].recv(1000))
    changed = {
        "one bit": [sent[0][:4] + b"F" + sent[0][5:]],
        "repeated": [sent[0], sent[0]],
        "left out": [sent[1]],
        "without a code": [frame(b"first") + bytes(16)],
    }
    real.sendall(b"".join(changed[change]))
    if change == "repeated":
        assert theirs.receive() == b"first"
    with pytest.raises(Refused, match="wrong code"):
        theirs.receive()
    for each in (real, theirs, *recorder):
        each.close()


def test_a_frame_longer_than_allowed_takes_no_memory() -> None:
    ours, theirs = channel.pair()
    ours.connection.sendall(LENGTH.pack(2**32 - 1))
    with pytest.raises(Refused, match="a frame of 4294967295 bytes where at most 100 are allowed"):
        theirs.receive(100)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


# ---- calls and answers ----


def test_a_process_that_cannot_read_a_call_ends(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = channel.pair()
    codes: list[int] = []
    inbox = Inbox(theirs, list, leave=codes.append)
    ours.send(b"\xc1 garbage")
    inbox._read()
    assert codes == [1]
    assert "a call cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize("data", [b"\xc1", b"", msgspec.msgpack.encode({"type": "Start"}), pack([None])])
def test_an_answer_that_cannot_be_read_ends_the_engine(data: bytes) -> None:
    ours, theirs = channel.pair()
    theirs.send(data)
    with pytest.raises(EngineProcessEnded, match="rank 1"):
        Child("rank 1", ours).next_message(SECONDS)


def test_tensors_come_back() -> None:
    sent = [torch.arange(6).view(2, 3), None, torch.rand(3, 0), torch.rand(2, dtype=torch.float32)]
    for x, y in zip(sent, unpack(pack(sent)), strict=True):
        assert (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))


@pytest.mark.parametrize(
    "x", [("object", [1], b"12345678"), ("int64", [2], b"12345678"), ("int64", [-1, -1], b"12345678"),
          ("int64", [2**40], b""), ("int64", "1", b""), 7]
)  # fmt: skip
def test_what_is_no_tensor_is_refused(x: object) -> None:
    with pytest.raises(ValueError, match=r"tensor|Expected|Object"):
        unpack(msgspec.msgpack.encode([x]))


# ---- transports ----


@contextlib.contextmanager
def attacked(kind: type[Transport]) -> Iterator[tuple[Any, Channel, Pool]]:
    """A transport whose other end greets as it should, and then is a stranger's."""
    pool = Pool(1, torch.float32, 1)
    ours, theirs = socket.socketpair()
    peer = Channel(theirs)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(kind, ours, pool)
        greeting = peer.receive(), peer.receive()
        peer.send(*map(bytes, greeting))
        transport: Any = made.result(SECONDS)
    try:
        yield transport, peer, pool
    finally:
        peer.close()
        transport.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


PAGE_BYTES = 2 * 2 * 8 * 4  # K and V of two heads
BAD_PAGES = {
    "a layer beyond": (Frame("pages", "room", 3, [1]), bytes(PAGE_BYTES), "pages of layer 3"),
    "a negative layer": (Frame("pages", "room", -1, [1]), bytes(PAGE_BYTES), "pages of layer -1"),
    "a page of another": (Frame("pages", "room", 0, [2]), bytes(PAGE_BYTES), "has not opened"),
    "a page beyond": (Frame("pages", "room", 0, [10**9]), bytes(PAGE_BYTES), "has not opened"),
    "a negative page": (Frame("pages", "room", 0, [-1]), bytes(PAGE_BYTES), "has not opened"),
    "a page twice": (Frame("pages", "room", 0, [1, 1]), bytes(2 * PAGE_BYTES), "has not opened"),
    "no room": (Frame("pages", "other", 0, [1]), bytes(PAGE_BYTES), "has not opened"),
    "too few bytes": (Frame("pages", "room", 0, [1]), bytes(PAGE_BYTES - 1), "bytes for 1 pages"),
    "too many bytes": (Frame("pages", "room", 0, [1]), bytes(PAGE_BYTES + 1), "where at most 128"),
    "bytes after an end": (Frame("end", "room"), b"x", "where at most 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PAGES)
def test_a_frame_that_is_wrong_ends_the_connection(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    header, payload, problem = BAD_PAGES[case]
    with attacked(Transport) as (transport, peer, pool):
        before = [buffer.clone() for buffer in pool.buffers()]
        transport.open_receiver("room", [1])
        peer.send(msgspec.msgpack.encode(header), payload)
        until(lambda: transport.is_lost)
        assert all(torch.equal(x, y) for x, y in zip(before, pool.buffers()))
        until(lambda: transport.poll("room") == "failed")
    assert problem in capfd.readouterr().err


NO_HEADERS = [b"\xc1", random.Random(0).randbytes(300), msgspec.msgpack.encode({"kind": 1})]


@pytest.mark.parametrize("data", NO_HEADERS, ids=["no type", "noise", "no frame"])
def test_a_header_that_is_none_ends_the_connection(data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with attacked(Transport) as (transport, peer, _):
        peer.send(data)
        until(lambda: transport.is_lost)
    assert "a transport has ended its connection" in capfd.readouterr().err


MEMORY_BYTES = 4096
BAD_MEMORY = {
    "larger than the file": (Memory(2**40), [Place(0, 0, 13)] * 6, True),
    "no file": (Memory(MEMORY_BYTES), [Place(0, 0, 13)] * 6, False),
    "pages beyond it": (Memory(MEMORY_BYTES), [Place(0, 0, 2**20)] * 6, True),
    "a place beyond it": (Memory(MEMORY_BYTES), [Place(0, MEMORY_BYTES - 1, 1)] * 6, True),
    "a negative place": (Memory(MEMORY_BYTES), [Place(0, -64, 1)] * 6, True),
    "another memory": (Memory(MEMORY_BYTES), [Place(1, 0, 1)] * 6, True),
    "too few layers": (Memory(MEMORY_BYTES), [Place(0, 0, 13)] * 4, True),
}


@pytest.mark.parametrize("case", BAD_MEMORY)
def test_memory_that_is_wrong_is_not_mapped(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory, places, has_file = BAD_MEMORY[case]
    with attacked(SharedMemoryTransport) as (transport, peer, _), (tmp_path / "memory").open("w+b") as file:
        file.truncate(MEMORY_BYTES)
        peer.send(*map(msgspec.msgpack.encode, (Frame("memory"), SharedPool([memory], places))))
        socket.send_fds(peer.connection, [b"f"], [file.fileno()] if has_file else [])
        until(lambda: transport.is_lost)
        assert transport._other is None
    assert "a transport has ended its connection" in capfd.readouterr().err


def test_pages_beyond_the_other_pool_end_the_connection(capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as threads:
        pools = [Pool(1, torch.float32, seed) for seed in (1, 2)]
        sender, receiver = threads.map(SharedMemoryTransport, socket.socketpair(), pools)
    receiver.open_receiver("room", [1])
    sender.open_sender("room")
    sender.send("room", [1], [10**6])
    until(lambda: receiver.poll("room") == "failed")  # after its writer has ended
    until(lambda: sender.is_lost)
    for end in (sender, receiver):
        end.close()
    assert "pages beyond the pool" in capfd.readouterr().err


def test_a_transport_between_computers(listener: Listener) -> None:
    """Its frames have codes."""
    pools = [Pool(1, torch.float32, seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        ours, theirs = threads.map(Transport, proved_pair(listener), pools)
    theirs.open_receiver("room", [3])
    ours.open_sender("room")
    ours.send("room", [5], [3])
    until(lambda: theirs.poll("room") == "done")
    assert all(torch.equal(x, y) for x, y in zip(pools[0].pages([5]), pools[1].pages([3])))
    for end in (ours, theirs):
        end.close()


# ---- ranks of a launcher ----


def test_a_launcher_needs_a_secret_that_only_this_user_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cluster_secret.SECRET, raising=False)
    with pytest.raises(ValueError, match=r"need a secret of at least 16 bytes.*DIPTYCH_CLUSTER_SECRET"):
        cluster_secret.cluster_secret(None)
    monkeypatch.setenv(cluster_secret.SECRET, SECRET.decode())
    assert cluster_secret.cluster_secret(None) == SECRET
    file = tmp_path / "secret"
    config = EngineConfig(cluster_secret_file=str(file))
    with pytest.raises(ValueError, match=r"cluster_secret_file: .*No such file"):
        cluster_secret.cluster_secret(config.cluster_secret_file)
    file.write_text("f" * MIN_SECRET_BYTES + "\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="others may open"):
        cluster_secret.cluster_secret(config.cluster_secret_file)
    file.chmod(0o600)
    assert cluster_secret.cluster_secret(config.cluster_secret_file) == b"f" * MIN_SECRET_BYTES


def test_only_ranks_with_the_secret_are_followers(listener: Listener) -> None:
    config = EngineConfig(tp=3, use={"transport": "shared_memory"})
    with ThreadPoolExecutor(1) as threads, socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(msgspec.msgpack.encode(launcher.Hello(1)))
        found = threads.submit(launcher._accept_all, listener, config, "/a")
        pipes = {rank: connect("127.0.0.1", listener.port, SECRET) for rank in (2, 1)}
        for rank, pipe in pipes.items():
            pipe.send(msgspec.msgpack.encode(launcher.Hello(rank)))
        hello = msgspec.msgpack.decode(pipes[1].receive(), type=launcher.Hello)
        assert EngineConfig(**hello.flags) == config
        assert hello.path == "/a"
        assert [child.name for child in found.result(SECONDS)] == ["rank 1", "rank 2"]
    config = config.updated(dist_timeout=1)
    with pytest.raises(EngineProcessEnded, match=r"ranks \[1, 2\] do not connect with the cluster's secret"):
        launcher._accept_all(listener, config, None)
    for wrong in (0, 3, -1):
        config = config.updated(dist_timeout=int(SECONDS))
        connect("127.0.0.1", listener.port, SECRET).send(msgspec.msgpack.encode(launcher.Hello(wrong)))
        with pytest.raises(ValueError, match=f"connect as rank {wrong}"):
            launcher._accept_all(listener, config, None)


def test_a_store_is_this_users_alone() -> None:
    store = meeting.local_store(1)
    folder = Path(store.path).parent
    store.set("a", "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert meeting.open_store(store.path, 1).get("a") == b"b"
    del store
    assert not folder.exists()
