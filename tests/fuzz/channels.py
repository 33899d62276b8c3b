"""What each channel between processes does with frames that are none. A case raises AssertionError if it does
anything but refuse them."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from diptych.reference.parallel import prompt_messages, shared_memory_transport, transport
from diptych.shared.engine.processes import child_messages, input_log, launcher
from diptych.shared.engine.processes.child_messages import Ready, Report, StepReport, step_report
from diptych.shared.engine.processes.input_log import Call
from diptych.shared.grammar.compiler import GrammarCompiler, Worker, WorkerEnded
from diptych.shared.grammar.worker import read_frame
from diptych.shared.interfaces import SchedulerStats
from diptych.shared.parallel import channel
from diptych.shared.parallel.channel import MIN_SECRET_BYTES, VERSION, Listener, Refused, connect
from diptych.shared.parallel.tensor_frames import pack, unpack
from diptych.shared.server.engine import messages
from diptych.shared.tools.conformance.contracts.transport.transfers import Pool
from diptych.shared.types import FinishLength, SamplingParams, StepOutput
from tests.fuzz.mutations import nearly

Case = Callable[[random.Random], None]
SECRET = b"s" * MIN_SECRET_BYTES
LENGTH = struct.Struct("!I")
encode = msgspec.msgpack.encode

REQUEST = input_log.Request("r", [1, 2], SamplingParams(), 0, [0], None, 0, None, None, False)
STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0.0)
READERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "calls": (
        input_log.decode,
        [encode(Call("add_request", 0.0, request=REQUEST)), encode(Call("run", 0.0, function="diptych.a:b"))],
    ),
    "answers": (
        lambda data: _all_outputs(child_messages.decode(data)),
        [
            encode(Ready({"a": [1]})),
            encode(Report("stacks", "error", [])),
            encode(step_report([StepOutput("r", [1], 1, FinishLength(1))], STATS, {"r": (0.0, None)})),
        ],
    ),
    "tensors": (unpack, [pack([torch.arange(6).view(2, 3), None, torch.rand(2)])]),
    "ranks of a launcher": (launcher._decode, [encode(launcher.Hello(1, {"tp": 2}, "/a"))]),
    "prompts to prefill": (
        prompt_messages.decode,
        [
            encode(prompt_messages.Start("r", REQUEST, 0, [1])),
            encode(prompt_messages.Computed("r", StepOutput("r", [1], 1))),
            encode(prompt_messages.Failed("r", "a")),
        ],
    ),
    "requests to the engine": (
        messages.decode_to_engine,
        [
            encode(messages.Generate(rid="r", input_ids=[1], params=SamplingParams(), seed=0)),
            encode(messages.Control(call_id=1, action="load", args={"a": [1]})),
        ],
    ),
    "outputs to the API": (
        messages.decode_from_engine,
        [encode(messages.Heartbeat(counter=1, load=messages.Load())), encode(messages.Dead(reason="a"))],
    ),
    "answers of a grammar worker": (lambda data: read_frame(io.BytesIO(data)), [b"\x05\0\0\0=abcd"]),
}


def _all_outputs(message: Any) -> Any:
    return message.all_outputs() if isinstance(message, StepReport) else message


def reader(name: str) -> Case:
    read, samples = READERS[name]

    def case(rng: random.Random) -> None:
        with contextlib.suppress(ValueError, Refused):
            read(nearly(rng.choice(samples), rng))

    return case


def frames(rng: random.Random) -> None:
    """A stream of frames of a process that has inherited the other end."""
    ours, theirs = channel.pair()
    data = b"".join(LENGTH.pack(len(each)) + each for each in (b"a" * 50, b"", b"b"))
    ours.connection.sendall(nearly(data, rng)[:100_000])
    ours.close()
    with contextlib.suppress(EOFError, Refused):
        while True:
            theirs.receive(1000)
    theirs.close()


def handshakes() -> tuple[Case, Callable[[], None]]:
    listener = Listener("127.0.0.1", SECRET)
    greeting = LENGTH.pack(len(VERSION) + 32) + VERSION + bytes(32)

    def case(rng: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(nearly(greeting + LENGTH.pack(32) + rng.randbytes(32), rng)[:100_000])
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(30)
            while stranger.recv(1000):
                pass
        assert listener._proved.empty()
        if rng.random() < 0.01:
            connect("127.0.0.1", listener.port, SECRET).close()
            listener.accept(30).close()

    return case, listener.close


def proved_frames() -> tuple[Case, Callable[[], None]]:
    """Frames of a proved channel that a third process has changed on their way: none arrives."""
    listener = Listener("127.0.0.1", SECRET)

    def case(rng: random.Random) -> None:
        ours, theirs = connect("127.0.0.1", listener.port, SECRET), listener.accept(30)
        real, (ours.connection, recorder) = ours.connection, socket.socketpair()
        sent = [b"first", b"", b"third"]
        ours.send(*sent)
        real.sendall(nearly(recorder.recv(10_000), rng)[:50_000])
        real.close()
        received = []
        with contextlib.suppress(EOFError, OSError):
            while True:
                received.append(theirs.receive(1000))
        assert received == sent[: len(received)]
        for each in (ours, theirs, recorder):
            each.close()

    return case, listener.close


FRAMES = [
    transport.Frame("message"), transport.Frame("pages", "room", 0, [1]), transport.Frame("pages", "room",
    2, [3, 1]),
    transport.Frame("end", "room"), transport.Frame("ack", "room"), transport.Frame("ask", "room"),
    transport.Frame("abort", "room"),
    transport.Frame("aborted", "room"), transport.Frame("memory"), transport.Frame("hello", layout="a"),
]  # fmt: skip
OPEN = [1, 3]
PLACES = [shared_memory_transport.Place(0, 0, 13)] * 6


def pages(kind: type[transport.Transport]) -> Case:
    """The other end of a transport is a stranger's, after it has greeted as it should."""

    def case(rng: random.Random) -> None:
        pool = Pool(1, torch.float32, 1)
        ours, theirs = socket.socketpair()
        peer = channel.Channel(theirs)
        greeter = threading.Thread(target=lambda: peer.send(*[bytes(peer.receive()) for _ in range(2)]))
        greeter.start()
        end: Any = kind(ours, pool)
        greeter.join()
        kept = [page for page in range(13) if page not in OPEN]
        before = pool.pages(kept)
        end.open_receiver("room", OPEN)
        end.open_sender("sent")
        theirs.settimeout(0.2)
        with contextlib.suppress(OSError):
            for _ in range(rng.randrange(1, 6)):
                frame = rng.choice(FRAMES)
                payload = bytes(128 * len(frame.pages)) if frame.kind == "pages" else b""
                header = encode(frame)
                if frame.kind == "memory":
                    memory = shared_memory_transport.Memory(rng.choice([0, 4096, 2**40]))
                    payload = encode(shared_memory_transport.SharedPool([memory], PLACES))
                if rng.random() < 0.7:
                    header, payload = nearly(header, rng), nearly(payload, rng)
                peer.send(header[:100_000], payload[:100_000])
                if frame.kind == "memory" and rng.random() < 0.7:
                    socket.send_fds(theirs, [b"f"], [rng.choice([0, theirs.fileno()])])
        peer.close()
        end._reader.join(30)
        assert not end._reader.is_alive(), "the reader hangs"
        end.close()
        assert end.poll("sent") == "failed"
        assert all(torch.equal(x, y) for x, y in zip(before, pool.pages(kept)))

    return case


GRAMMARS = [
    ["regex", r"a{1,3}(b|c)*", 0.3], ["json_schema",
    '{"type":"object","properties":{"a":{"type":"integer"}}}', 0.3],
    ["ebnf", 'root ::= "a" root | "b"', 0.3], ["json_object", "", 0.3], ["structural_tag", "{}", 0.3],
]  # fmt: skip


def grammar_worker(compiler: GrammarCompiler) -> tuple[Case, Callable[[], None]]:
    """Grammars of clients, and frames that are none."""
    info = compiler._tokenizer_info().serialize_json()
    workers: list[Worker] = []

    def case(rng: random.Random) -> None:
        if not workers:
            workers.append(Worker(info))
        kind, text, seconds = rng.choice(GRAMMARS)
        text = nearly(text.encode(), rng)[: 64 * 1024].decode("utf-8", "replace")
        try:
            answer = workers[0].ask([kind, text, seconds], 30.0)
        except WorkerEnded as end:
            workers.pop().kill()
            if end.is_late:
                raise AssertionError(f"no end of {kind} {text!r}") from None
        else:
            assert answer[0] in "=!"

    def close() -> None:
        for worker in workers:
            worker.kill()

    return case, close


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What refuses frames says so on stderr."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
