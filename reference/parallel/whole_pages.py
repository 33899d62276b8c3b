"""KV pages and states of the whole model, where each of several ranks has some heads of them.

What travels between two engines is the whole model's, so both may have any number of ranks. Rank 0 has the
connection. Before a transfer the heads of all ranks are gathered there; after it each rank gets its own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch

from diptych.reference.parallel.transport import Frame, Transport
from diptych.shared.interfaces import Collectives
from diptych.shared.loading.sent_pool import SentPool, is_of_states, parts_of
from diptych.shared.parallel.channel import Channel, Refused

Contents = dict[int, Any]
"""Layer -> the bytes of a room there: K of all pages, then V, or rows that hold both; or its state."""


class HeadParts:
    """The parts of a page that the ranks have. With fewer KV heads than ranks, neighbouring ranks have the
    same part, and the first of them sends it. Of states every rank has a part of its own."""

    def __init__(self, kv_pool: Any, tp: Collectives, num_parts: int) -> None:
        """num_parts: that differ; 1: every rank has all, as it has of the KV of a drafter."""
        assert tp.size % num_parts == 0, f"{num_parts} parts on {tp.size} ranks"
        self.kv_pool = kv_pool
        self.tp = tp
        self.num_parts = num_parts

    def num_parts_of(self, layer: int) -> int:
        if is_of_states(self.kv_pool, layer):
            return self.tp.size
        is_whole = isinstance(self.kv_pool, SentPool) and self.kv_pool.is_of_drafter(layer)
        return 1 if is_whole else self.num_parts

    def ids_of(self, layer: int, pages: Sequence[int], row: int | None) -> list[int]:
        if is_of_states(self.kv_pool, layer):
            return [] if row is None else [row]
        return list(pages)

    # --8<-- [start:gather-heads]
    def gather(self, pages: Sequence[int], row: int | None = None) -> Contents:
        """Called on all ranks. On rank 0: the contents of these pages and of this state."""
        contents: Contents = {}
        for layer in range(self.kv_pool.num_layers):
            ids, num_parts = self.ids_of(layer, pages, row), self.num_parts_of(layer)
            copies = self.tp.size // num_parts
            buffers = parts_of(self.kv_pool, layer)
            own = torch.cat([buffer[ids].cpu().flatten(1) for buffer in buffers], dim=1)
            num = [len(ids) * (rank % copies == 0) for rank in range(self.tp.size)]
            to_first = [num[self.tp.rank]] + [0] * (self.tp.size - 1)
            from_each = num if self.tp.rank == 0 else [0] * self.tp.size
            parts = self.tp.all_to_all(own[: num[self.tp.rank]], to_first, from_each)
            if self.tp.rank == 0:
                each = parts.unflatten(0, (num_parts, len(ids))).split(sizes_of(buffers), dim=-1)
                parts_of_heads = [part.unflatten(-1, buffer.shape[1:]) for part, buffer in zip(each, buffers)]
                whole = torch.cat([heads.movedim(0, -2).flatten() for heads in parts_of_heads])
                contents[layer] = bytearray(whole.numpy())
        return contents

    # --8<-- [end:gather-heads]

    def scatter(self, pages: Sequence[int], contents: Contents, row: int | None = None) -> None:
        """Called on all ranks. Write the contents that rank 0 has to these pages, and to this row."""
        for layer in range(self.kv_pool.num_layers):
            ids, num_parts = self.ids_of(layer, pages, row), self.num_parts_of(layer)
            buffers = parts_of(self.kv_pool, layer)
            sizes = sizes_of(buffers)
            to_each, sent = [0] * self.tp.size, torch.empty(0, sum(sizes), dtype=torch.uint8)
            if self.tp.rank == 0:
                to_each = [len(ids)] * self.tp.size
                whole = torch.frombuffer(contents[layer], dtype=torch.uint8)
                each = whole.split([len(ids) * num_parts * size for size in sizes])
                parts = [
                    part.view(len(ids), buffer.shape[1], num_parts, -1).movedim(-2, 0).flatten(2)
                    for part, buffer in zip(each, buffers)
                ]
                part_of = torch.arange(self.tp.size) * num_parts // self.tp.size
                heads = torch.cat(parts, dim=-1)
                sent = heads[part_of].flatten(0, 1)
            own = self.tp.all_to_all(sent, to_each, [len(ids)] + [0] * (self.tp.size - 1))
            for buffer, part in zip(buffers, own.split(sizes, dim=1)):
                buffer[ids] = part.unflatten(1, buffer.shape[1:]).to(buffer.device)
        if self.kv_pool.device.type == "cuda":
            torch.cuda.synchronize(self.kv_pool.device)


def sizes_of(buffers: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of a page, or of a state, in each."""
    return [buffer[0].numel() for buffer in buffers]


class WholeTransport(Transport):
    """A transport on rank 0: what it sends was gathered before, and what it receives is scattered after."""

    def __init__(self, connection: socket.socket | Channel, parts: HeadParts) -> None:
        self.parts = parts
        self._contents: dict[str, Contents] = {}  # by room
        super().__init__(connection, parts.kv_pool)

    def send_contents(
        self, room: str, contents: Contents, target_pages: Sequence[int], target_row: int | None
    ) -> None:
        """`send`, of what has been gathered."""
        self._contents[room] = contents
        self.send(room, [], target_pages, None, target_row)

    def take(self, room: str) -> Contents:
        """What was sent or received in a room that has ended."""
        return self._contents.pop(room, {})

    def _copy(self, room: str, layer: int, source: list[int], target: list[int]) -> None:
        if not self._is_aborted(room):
            self._put_frame(Frame("pages", room, layer, target), self._contents[room].pop(layer))

    def _store(self, frame: Frame, payload: bytearray) -> None:
        if frame.pages != self._opened(self._rooms[frame.room], frame.layer):
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
