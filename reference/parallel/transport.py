"""Transfers KV pages and states from one pool to another through a connection.

Each end has two threads. The writer sends frames from a queue in order, so that a frame queued after a room's
pages also arrives after them. The reader applies what arrives. A room ends at an end only when its threads
are past it:

- done: the receiver has read `end`, and answers `ack`; the sender has read `ack`;
- failed: the receiver has sent `abort`, by itself or because of the sender's `ask`. The sender then drops
  what it has not sent, and `aborted` follows what it has. The sender's room ends when its writer is there,
  the receiver's when it reads `aborted`.

What arrives is checked: a frame for another layer, for pages that its room has not opened, or of another
length than its pages, ends the connection.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import torch

from diptych.shared.interfaces import transport as interface
from diptych.shared.interfaces.transport import TransferStatus
from diptych.shared.loading.sent_pool import is_of_states, names_of, parts_of
from diptych.shared.parallel.channel import Channel, Refused, decoder

MAX_HEADER_BYTES = 64 * 2**20
MAX_MESSAGE_BYTES = 256 * 2**20
CLOSE_SECONDS = 5.0
"""Seconds for the writer to send the rest when an end closes."""


class Frame(msgspec.Struct):
    kind: str  # hello, memory, message, pages, end, ack, ask, abort, aborted
    room: str = ""
    layer: int = 0
    pages: list[int] = []  # of the receiver; of a layer of states its row
    layout: str = ""  # hello: what must be equal


_decode = decoder(Frame)


@dataclass
class Room:
    is_sender: bool
    status: TransferStatus = "open"
    is_aborted: bool = False  # on its way to failed
    pages: list[int] = field(default_factory=list)  # of a receiver
    rows: list[int] = field(default_factory=list)  # of its states


class Transport(interface.Transport):
    """A transport through the connection."""

    def __init__(self, connection: socket.socket | Channel, kv_pool: Any) -> None:
        """connection: between computers a channel that has proved the secret."""
        self.channel = connection if isinstance(connection, Channel) else Channel(connection)
        self.connection = self.channel.connection
        self.kv_pool = kv_pool
        self.is_lost = False
        self._rooms: dict[str, Room] = {}
        self._early_aborts: set[str] = set()  # of rooms that the sender has not opened yet
        self._messages: list[bytes] = []
        self._lock = threading.Lock()  # of the four above
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()  # functions; None: the end
        self._greet()
        self._writer = threading.Thread(target=self._write, name="transport writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="transport reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def open_sender(self, room: str) -> None:
        self._open(room, Room(is_sender=True))
        with self._lock:
            is_aborted = room in self._early_aborts
            self._early_aborts.discard(room)
        if is_aborted:
            self._abort_sender(room)

    def open_receiver(self, room: str, pages: Sequence[int], row: int | None = None) -> None:
        self._open(room, Room(is_sender=False, pages=list(pages), rows=_rows(row)))

    # --8<-- [start:send-pages]
    def send(
        self,
        room: str,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        source_row: int | None = None,
        target_row: int | None = None,
    ) -> None:
        pages, rows = (list(source_pages), list(target_pages)), (_rows(source_row), _rows(target_row))
        for layer in range(self.kv_pool.num_layers):
            sent = rows if is_of_states(self.kv_pool, layer) else pages
            self._outgoing.put(lambda n=layer, sent=sent: self._copy(room, n, *sent))
        self._outgoing.put(lambda: None if self._is_aborted(room) else self._put_frame(Frame("end", room)))

    def _copy(self, room: str, layer: int, source: list[int], target: list[int]) -> None:
        """Copy one layer, in the writer thread."""
        if not self._is_aborted(room):
            pages = [_bytes_of(pages[source]) for pages in self._pages(layer)]
            self._put_frame(Frame("pages", room, layer, target), b"".join(pages))

    # --8<-- [end:send-pages]

    def poll(self, room: str) -> TransferStatus:
        with self._lock:
            status = self._rooms[room].status
            if status != "open":
                del self._rooms[room]
            return status

    def abort(self, room: str) -> None:
        with self._lock:
            known = self._rooms.get(room)
            if known is None or known.is_aborted or known.status != "open":
                return
            known.is_aborted = True
        kind = "ask" if known.is_sender else "abort"
        self._outgoing.put(lambda: self._put_frame(Frame(kind, room)))

    def post(self, message: bytes) -> None:
        self._outgoing.put(lambda: self._put_frame(Frame("message"), message))

    def messages(self) -> list[bytes]:
        with self._lock:
            found, self._messages = self._messages, []
            return found

    def close(self) -> None:
        """Close the transport. The writer ends before the connection, so the other end knows that no more is
        written."""
        self.is_lost = True
        self._outgoing.put(None)
        self._writer.join(CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # ends the reader
        self._reader.join()
        self.connection.close()

    def _open(self, room: str, new: Room) -> None:
        with self._lock:
            assert room not in self._rooms, f"room {room} is open"
            new.status = "failed" if self.is_lost else "open"
            self._rooms[room] = new

    def _is_aborted(self, room: str) -> bool:
        with self._lock:
            known = self._rooms.get(room)
            return self.is_lost or known is None or known.is_aborted

    def _end(self, room: str, status: TransferStatus) -> None:
        with self._lock:
            if room in self._rooms and self._rooms[room].status == "open":
                self._rooms[room].status = status

    def _abort_sender(self, room: str) -> None:
        """End the sender's side of a room that the receiver has aborted."""
        with self._lock:
            if room not in self._rooms:
                self._early_aborts.add(room)
                return
            self._rooms[room].is_aborted = True
        self._outgoing.put(lambda: self._end_aborted(room))

    def _end_aborted(self, room: str) -> None:
        """Send `aborted`, in the sender's writer, after all frames of the room."""
        self._put_frame(Frame("aborted", room))
        self._end(room, "failed")

    def _greet(self) -> None:
        pool = self.kv_pool
        self._layout = [self._page_layout(layer) for layer in range(pool.num_layers)]
        shapes = dict.fromkeys(tuple(pages.shape[1:]) for pages in chain.from_iterable(self._layout))
        own = Frame("hello", layout=f"{pool.num_layers} layers, {[*shapes]} {pool.dtype}, {names_of(pool)}")
        self._put_frame(own)
        other, _ = self._take_frame()
        if other.layout != own.layout:
            self.connection.close()
            raise ValueError(f"pages of {own.layout} here, and of {other.layout} at the other end")

    def _write(self) -> None:
        while (task := self._outgoing.get()) is not None:
            try:
                task()
            except Refused as error:
                self._refuse(error)
            except OSError:
                pass  # the reader detects it

    def _read(self) -> None:
        try:
            while True:
                self._apply(*self._take_frame())
        except (Refused, ValueError, RuntimeError) as error:
            self._refuse(error)
        except (OSError, EOFError):
            pass
        self.is_lost = True
        self._outgoing.put(None)
        self._writer.join()  # from here on no thread touches a page
        with self._lock:
            for room in self._rooms.values():
                if room.status == "open":
                    room.status = "failed"

    def _refuse(self, error: Exception) -> None:
        """End the connection because of what arrives."""
        print(f"a transport has ended its connection: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _apply(self, frame: Frame, payload: bytearray) -> None:
        """Apply a frame, in the reader thread."""
        if frame.kind == "message":
            with self._lock:
                self._messages.append(bytes(payload))
        elif frame.kind == "pages" and not self._is_aborted(frame.room):
            self._store(frame, payload)
        elif frame.kind == "end" and not self._is_aborted(frame.room):
            self._end(frame.room, "done")
            self._outgoing.put(lambda: self._put_frame(Frame("ack", frame.room)))
        elif frame.kind == "ack":
            self._end(frame.room, "done")
        elif frame.kind == "ask":
            self.abort(frame.room)
        elif frame.kind == "abort":
            self._abort_sender(frame.room)
        elif frame.kind == "aborted":
            self._end(frame.room, "failed")

    def _num_bytes(self, frame: Frame) -> int:
        """The most bytes that may follow a frame. Raises `Refused` for one that cannot be applied."""
        if frame.kind != "pages":
            return MAX_MESSAGE_BYTES if frame.kind in ("message", "memory") else 0
        if not 0 <= frame.layer < self.kv_pool.num_layers:
            raise Refused(f"pages of layer {frame.layer}, and the pool has {self.kv_pool.num_layers}")
        with self._lock:
            room = self._rooms.get(frame.room)
            opened = [] if room is None or room.is_sender else self._opened(room, frame.layer)
        if len(set(frame.pages)) < len(frame.pages) or not set(frame.pages) <= set(opened):
            raise Refused(f"pages that room {frame.room!r:.100} has not opened")
        return len(frame.pages) * sum(pages[0].numel() for pages in self._layout[frame.layer])

    def _store(self, frame: Frame, payload: bytearray) -> None:
        sizes = [len(frame.pages) * pages[0].numel() for pages in self._layout[frame.layer]]
        contents = torch.frombuffer(payload, dtype=torch.uint8).split(sizes)
        self._put_pages(self._pages(frame.layer), frame.pages, contents)

    def _put_pages(
        self, targets: Sequence[torch.Tensor], page_ids: list[int], contents: Sequence[torch.Tensor]
    ) -> None:
        """Write the contents of pages to the targets of a layer, [num_pages, ...] each. Returns when they are
        written. Raises `Refused` for pages beyond them."""
        if not all(0 <= page < len(targets[0]) for page in page_ids):
            raise Refused("pages beyond the pool")
        for pages, content in zip(targets, contents):
            pages[page_ids] = content.view(len(page_ids), *pages.shape[1:]).to(pages.device)
        if targets[0].is_cuda:
            torch.cuda.synchronize(targets[0].device)

    def _opened(self, room: Room, layer: int) -> list[int]:
        return room.rows if is_of_states(self.kv_pool, layer) else room.pages

    def _pages(self, layer: int) -> list[torch.Tensor]:
        return parts_of(self.kv_pool, layer)

    def _page_layout(self, layer: int) -> list[torch.Tensor]:
        """Pages as those that travel: their shape counts."""
        return self._pages(layer)

    def _put_frame(self, frame: Frame, payload: bytes = b"") -> None:
        self.channel.send(msgspec.msgpack.encode(frame), payload)

    def _take_frame(self) -> tuple[Frame, bytearray]:
        frame = _decode(self.channel.receive(MAX_HEADER_BYTES))
        payload = self.channel.receive(self._num_bytes(frame))
        if frame.kind == "pages" and len(payload) != self._num_bytes(frame):
            raise Refused(f"{len(payload)} bytes for {len(frame.pages)} pages")
        return frame, payload


def _rows(row: int | None) -> list[int]:
    return [] if row is None else [row]


def _bytes_of(x: torch.Tensor) -> bytes:
    return bytes(x.cpu().numpy())
