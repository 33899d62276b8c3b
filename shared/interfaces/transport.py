"""Contract of a transport: KV pages of one engine's pool, and states, copied into the pool of another."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from diptych.shared.interfaces.memory_pool import TokenToKVPool

TransferStatus = Literal["open", "done", "failed"]


class Transport(ABC):
    """One end of a connection; each end has a pool, and both have pages of one shape and dtype. A *room* is
    one transfer, under a name that both ends know. The receiver opens it first, then the sender, who has
    learned of it by a message. No method waits for the other end, but the constructor does.

    With linear attention a pool has states too (a `SentPool`), and a room one row of them beside its pages:
    the state of the same tokens.

    A room is `open` until every page and the row have been written, which makes it `done`, or until an end
    aborts it or the connection is lost, which makes it `failed`. From then on nothing reads the pages of the
    sender or writes those of the receiver: they may be freed. Until then they must not be, even after
    `abort`: a write may be under way. Each end learns of it by itself, through `poll`.
    """

    is_lost: bool  # the connection; it does not come back

    @abstractmethod
    def __init__(self, connection: socket.socket, kv_pool: TokenToKVPool) -> None:
        """connection: of stream type; the transport owns it. Waits for the other end, which does the same.
        Raises `ValueError` if pages or states of the other pool have another shape or dtype."""

    @abstractmethod
    def open_sender(self, room: str) -> None:
        """This end will send, or abort. The receiver may have aborted already."""

    @abstractmethod
    def open_receiver(self, room: str, pages: Sequence[int], row: int | None = None) -> None:
        """This end will receive into these pages of its pool, and this row of its states."""

    @abstractmethod
    def send(
        self,
        room: str,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        source_row: int | None = None,
        target_row: int | None = None,
    ) -> None:
        """Copy pages of this pool to pages of the other, in all layers, and a row of its states: all that the
        receiver has opened, each once. Returns before the copy is complete. Without effect in a room that
        is aborted."""

    @abstractmethod
    def poll(self, room: str) -> TransferStatus:
        """A status other than `open` is returned once: the room is forgotten, and its name may be used again.
        `KeyError` for a room that is not known."""

    @abstractmethod
    def abort(self, room: str) -> None:
        """Ask for the end of a transfer, at either end: the room becomes `failed`, or `done` if it was about
        to be. Without effect in a room that is not known."""

    @abstractmethod
    def post(self, message: bytes) -> None:
        """A message for the other end. Messages arrive in order."""

    @abstractmethod
    def messages(self) -> list[bytes]:
        """Those that have arrived since the last call."""

    @abstractmethod
    def close(self) -> None:
        """End the connection. Every open room fails, at both ends."""
