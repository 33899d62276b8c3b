"""Channels between processes of the engine and the server: frames of bytes over a socket.

Processes of one computer inherit the two ends of a socket pair, which no other process reaches. Between
computers each end first proves that it knows a secret, and then every frame has a code that only the two can
make. The content is not encrypted.

A frame is four bytes of length, the data, and between computers the code. What the data mean is typed by
the reader (msgspec): no frame can run code.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

VERSION = b"diptych channel 1\n"
MAX_BYTES = 2**30
"""Of one frame."""
HANDSHAKE_SECONDS = 5.0
MIN_SECRET_BYTES = 16
Data = bytes | bytearray
_LENGTH = struct.Struct("!I")
_NONCE_BYTES = 32


def decoder(kind: Any) -> Callable[[Data], Any]:
    """A function that reads MessagePack of this type. It raises `ValueError` for anything else."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_any(data: Data) -> Any:
        try:
            return decode(data)
        except RecursionError:
            raise ValueError("the data are nested too deeply") from None

    return decode_any


class Refused(ConnectionError):
    """The other end has not proved the secret, or what it sends is no frame."""


class Channel:
    """One end. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        """The channel owns the connection."""
        self.connection = connection
        self._lock = threading.Lock()  # of sending
        self._codes: tuple[_Codes, _Codes] | None = None  # of what is sent, and of what is received
        self._deadline: float | None = None

    def __reduce__(self) -> Any:
        return Channel, (self.connection,)  # a process that this one starts inherits it

    def send(self, *frames: Data) -> None:
        """Send frames, one directly after the other. Raises `OSError` if the connection has ended."""
        with self._lock:
            parts: list[Data] = []
            for data in frames:
                parts += [_LENGTH.pack(len(data)), data]
                if self._codes is not None:
                    parts.append(self._codes[0].next(data))
            self.connection.sendall(b"".join(parts))

    def receive(self, max_bytes: int = MAX_BYTES) -> bytearray:
        """The next frame. Raises `EOFError` at the end of the connection, and `Refused`, an `OSError`, for
        one that is longer or has a wrong code."""
        (num_bytes,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if num_bytes > max_bytes:
            raise Refused(f"a frame of {num_bytes} bytes where at most {max_bytes} are allowed")
        data = self._take(num_bytes)
        if self._codes is not None:
            code = self._codes[1].next(data)
            if not hmac.compare_digest(self._take(len(code)), code):
                raise Refused("a frame with a wrong code")
        return data

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether a frame, or the end, can be received within this time."""
        return bool(wait([self], seconds))

    def close(self) -> None:
        self.connection.close()

    @property
    def is_closed(self) -> bool:
        return self.connection.fileno() < 0

    def prove(self, secret: bytes, is_caller: bool) -> None:
        """Prove the secret to the other end, which proves it too, within `HANDSHAKE_SECONDS`. Each proof is
        over random bytes of both, so none can be used again. Raises `OSError` or `EOFError`."""
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        own, roles = secrets.token_bytes(_NONCE_BYTES), [b"listener", b"caller"]
        self.send(VERSION + own)
        greeting = bytes(self.receive(len(VERSION) + _NONCE_BYTES))
        if not greeting.startswith(VERSION) or len(greeting) != len(VERSION) + _NONCE_BYTES:
            raise Refused(f"the other end does not greet with {VERSION!r}")
        other = greeting.removeprefix(VERSION)
        nonces = other + own if is_caller else own + other
        ours, theirs = (hmac.digest(secret, roles[i] + nonces, "sha256") for i in (is_caller, not is_caller))
        self.send(ours)
        if not hmac.compare_digest(self.receive(len(theirs)), theirs):
            raise Refused("the other end does not know the secret")
        keys = [hmac.digest(secret, b"frames of " + role + nonces, "sha256") for role in roles]
        self._codes = _Codes(keys[is_caller]), _Codes(keys[not is_caller])
        self._deadline = None
        self.connection.settimeout(None)

    def _take(self, size: int) -> bytearray:
        data = bytearray(size)
        view, start = memoryview(data), 0
        while start < size:
            if self._deadline is not None:
                self.connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            num_read = self.connection.recv_into(view[start:])
            if num_read == 0:
                raise EOFError
            start += num_read
        return data


def signed(text: str, secret: bytes) -> str:
    """The text with a proof that its author knows the secret."""
    return f"{text} {_proof(text, secret)}"


def verified(text: str, secret: bytes) -> str:
    """The text of `signed`. Raises `ValueError` if it was signed with another secret."""
    content, _, proof = text.rpartition(" ")
    if not hmac.compare_digest(proof.encode(), _proof(content, secret).encode()):
        raise ValueError("an address that is not signed with the cluster's secret")
    return content


def _proof(text: str, secret: bytes) -> str:
    return hmac.digest(secret, b"text " + text.encode(), "sha256").hex()


class _Codes:
    """The codes of successive frames in one direction. A frame that is left out or repeated has another."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.number = 0

    def next(self, data: Data) -> bytes:
        self.number += 1
        code = hashlib.blake2b(data, key=self.key, salt=self.number.to_bytes(16, "big"), digest_size=16)
        return code.digest()


def pair() -> tuple[Channel, Channel]:
    """The two ends of a channel on this computer."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def wait(channels: Iterable[Channel], seconds: float | None) -> list[Channel]:
    """Those with something to receive, the end included; None: wait without limit."""
    ready = []
    with selectors.PollSelector() as selector:
        for channel in channels:
            if channel.is_closed:
                ready.append(channel)
            else:
                selector.register(channel.connection, selectors.EVENT_READ, channel)
        return ready + [key.data for key, _ in selector.select(0 if ready else seconds)]


class Listener:
    """Takes connections of processes that know the secret. Others are refused, each in a thread of its own,
    so that none delays another."""

    def __init__(self, host: str, secret: bytes, port: int = 0) -> None:
        """Listens on a port of this interface; 0: a free one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, port), family=family)
        self.port: int = self.socket.getsockname()[1]
        self.secret = secret
        self._proved: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def accept(self, seconds: float | None) -> Channel:
        """Raises `queue.Empty` if none comes in time (None: no limit), and `EOFError` once it is closed."""
        channel = self._proved.get(timeout=seconds)
        if channel is None:
            raise EOFError("the listener is closed")
        return channel

    def close(self) -> None:
        """Take no more connections."""
        self.socket.shutdown(socket.SHUT_RDWR)  # ends the thread too
        self.socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                self._proved.put(None)
                return
            threading.Thread(target=self._greet, args=(Channel(connection),), daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            channel.prove(self.secret, is_caller=False)
        except (OSError, EOFError):
            channel.close()
        else:
            self._proved.put(channel)


def connect(host: str, port: int, secret: bytes) -> Channel:
    """Connect to a `Listener`. Raises `Refused` if it has another secret or is none, and `OSError` if nothing
    listens."""
    channel = Channel(socket.create_connection((host, port), HANDSHAKE_SECONDS))
    try:
        channel.prove(secret, is_caller=True)
    except (OSError, EOFError):
        channel.close()
        raise Refused(f"what listens at {host}:{port} does not prove the same secret") from None
    return channel
