"""KV pages of the whole model, where each of several ranks has some heads of them.

What travels between two engines is the whole model's KV, so both may have any number of ranks. Rank 0 has the
connection. Before a transfer the heads of all ranks are gathered there; after it each rank gets its own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch

from diptych.reference.parallel.transport import Frame, Transport
from diptych.shared.interfaces import Collectives
from diptych.shared.interfaces.host_pool import byte_rows
from diptych.shared.loading.sent_pool import SentPool
from diptych.shared.parallel.channel import Channel, Refused

Contents = dict[int, Any]
"""Layer -> the bytes of a room's pages there: K of all pages, then V, or rows that hold both."""


class HeadParts:
    """The parts of a page that the ranks have. With fewer KV heads than ranks, neighbouring ranks have the
    same part, and the first of them sends it."""

    def __init__(self, kv_pool: Any, tp: Collectives, num_parts: int) -> None:
        """num_parts: that differ; 1: every rank has all, as it has of the KV of a drafter."""
        assert tp.size % num_parts == 0, f"{num_parts} parts on {tp.size} ranks"
        self.kv_pool = kv_pool
        self.tp = tp
        self.num_parts = num_parts

    def num_parts_of(self, layer: int) -> int:
        is_whole = isinstance(self.kv_pool, SentPool) and self.kv_pool.is_of_drafter(layer)
        return 1 if is_whole else self.num_parts

    def pages(self, layer: int) -> list[torch.Tensor]:
        """The bytes of this rank's part, [num_pages, page_size, width], of K and of V, or of both in one."""
        return [rows.unflatten(0, (-1, self.kv_pool.page_size)) for rows in byte_rows(self.kv_pool, layer)]

    # --8<-- [start:gather-heads]
    def gather(self, pages: Sequence[int]) -> Contents:
        """Called on all ranks. On rank 0: the contents of these pages."""
        contents: Contents = {}
        for layer in range(self.kv_pool.num_layers):
            num_parts = self.num_parts_of(layer)
            copies = self.tp.size // num_parts
            own = torch.stack([part[list(pages)].cpu() for part in self.pages(layer)])
            num = [len(own) * len(pages) * (rank % copies == 0) for rank in range(self.tp.size)]
            to_first = [num[self.tp.rank]] + [0] * (self.tp.size - 1)
            from_each = num if self.tp.rank == 0 else [0] * self.tp.size
            sent = own.flatten(0, 1)[: num[self.tp.rank]]
            parts = self.tp.all_to_all(sent, to_first, from_each)
            if self.tp.rank == 0:
                heads = parts.unflatten(0, (num_parts, len(own), len(pages)))
                contents[layer] = bytearray(heads.movedim(0, -2).contiguous().numpy())
        return contents

    # --8<-- [end:gather-heads]

    def scatter(self, pages: Sequence[int], contents: Contents) -> None:
        """Called on all ranks. Write the contents that rank 0 has to these pages."""
        for layer in range(self.kv_pool.num_layers):
            targets, num_parts = self.pages(layer), self.num_parts_of(layer)
            shape = len(targets), len(pages), *targets[0].shape[1:]
            num, sent = len(targets) * len(pages), torch.empty(0, *shape[2:], dtype=torch.uint8)
            to_each = [0] * self.tp.size
            if self.tp.rank == 0:
                to_each = [num] * self.tp.size
                whole = torch.frombuffer(contents[layer], dtype=torch.uint8)
                heads = whole.view(*shape[:-1], num_parts, shape[-1]).movedim(-2, 0)
                part_of = torch.arange(self.tp.size) * num_parts // self.tp.size
                sent = heads[part_of].flatten(0, 2)
            own = self.tp.all_to_all(sent, to_each, [num] + [0] * (self.tp.size - 1))
            for target, part in zip(targets, own.view(shape)):
                target[list(pages)] = part.to(target.device)
        if self.kv_pool.device.type == "cuda":
            torch.cuda.synchronize(self.kv_pool.device)


class WholeTransport(Transport):
    """A transport on rank 0: what it sends was gathered before, and what it receives is scattered after."""

    def __init__(self, connection: socket.socket | Channel, parts: HeadParts) -> None:
        self.parts = parts
        self._contents: dict[str, Contents] = {}  # by room
        super().__init__(connection, parts.kv_pool)

    def send_contents(self, room: str, contents: Contents, target_pages: Sequence[int]) -> None:
        """`send`, of pages that have been gathered."""
        self._contents[room] = contents
        self.send(room, [], target_pages)

    def take(self, room: str) -> Contents:
        """What was sent or received in a room that has ended."""
        return self._contents.pop(room, {})

    def _copy(self, room: str, layer: int, source: list[int], target: list[int]) -> None:
        if not self._is_aborted(room):
            self._put_frame(Frame("pages", room, layer, target), self._contents[room].pop(layer))

    def _store(self, frame: Frame, payload: bytearray) -> None:
        if frame.pages != self._rooms[frame.room].pages:
            raise Refused(f"a part of the pages of room {frame.room!r:.100}, or in another order")
        self._contents.setdefault(frame.room, {})[frame.layer] = payload

    def _apply(self, frame: Frame, payload: bytearray) -> None:
        is_end = frame.kind == "end" and not self._is_aborted(frame.room)
        if is_end and len(self._contents.get(frame.room, ())) < self.kv_pool.num_layers:
            raise Refused(f"the end of room {frame.room!r:.100}, before all layers of it")
        super()._apply(frame, payload)

    def _page_layout(self, layer: int) -> list[torch.Tensor]:
        pages, num_parts = super()._page_layout(layer), self.parts.num_parts_of(layer)
        return [each.new_empty(1, each.shape[1], each.shape[2] * num_parts) for each in pages]
