"""Transfers KV pages into the other engine's pool, on the same computer: into memory that both map."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from diptych.reference.parallel.transport import Frame, Transport
from diptych.shared.parallel.channel import Refused, decoder

WAIT_SECONDS = 0.001
"""Seconds between two looks for the memory of the other end."""


class Memory(msgspec.Struct):
    """Memory of a pool. Of a CPU's, a file descriptor follows the frame."""

    size: int  # bytes
    of_gpu: tuple[int, bytes, int, int, bytes, int, bytes, bool] | None = None  # as torch describes it


class Place(msgspec.Struct, array_like=True):
    """Where a buffer of a layer is: in which memory, from which byte on, how many pages."""

    memory: int
    offset: int
    num_pages: int


class SharedPool(msgspec.Struct):
    memories: list[Memory]
    places: list[Place]  # k and v of each layer, or the one buffer of both


_decode = decoder(SharedPool)


class SharedMemoryTransport(Transport):
    """A transport that writes to the other end's pool, on the same computer: in memory that both processes
    map, of the CPU or of a GPU. Other frames use the connection, a socket pair: files pass through it."""

    _is_shared = False
    _other: list[list[torch.Tensor]] | None = None  # pages of the buffers of each layer

    def open_receiver(self, room: str, pages: Sequence[int], row: int | None = None) -> None:
        if not self._is_shared:
            self._is_shared = True
            self._share()
        super().open_receiver(room, pages, row)

    def _share(self) -> None:
        """Send what the other end needs to map this pool."""
        shared, files, numbers = SharedPool([], []), list[int](), dict[int, int]()
        for layer in range(self.kv_pool.num_layers):
            for pages in self._pages(layer):
                storage: Any = pages.untyped_storage()
                if storage._cdata not in numbers:
                    numbers[storage._cdata] = len(numbers)
                    of_gpu = storage._share_cuda_() if pages.is_cuda else None
                    shared.memories.append(Memory(storage.nbytes(), of_gpu))
                    if of_gpu is None:
                        files.append(storage._share_fd_cpu_()[0])  # it moves into memory without a name
                shared.places.append(Place(numbers[storage._cdata], int(pages.storage_offset()), len(pages)))
        self._outgoing.put(lambda: self._send_memory(shared, files))

    def _send_memory(self, shared: SharedPool, files: list[int]) -> None:
        self._put_frame(Frame("memory"), msgspec.msgpack.encode(shared))
        for file in files:
            socket.send_fds(self.connection, [b"f"], [file])

    def _apply(self, frame: Frame, payload: bytearray) -> None:
        if frame.kind == "memory":
            shared: SharedPool = _decode(payload)
            storages = [self._map(memory) for memory in shared.memories]
            likes = [pages for layer in self._layout for pages in layer]
            if len(shared.places) != len(likes):
                raise Refused(f"{len(shared.places)} buffers for {self.kv_pool.num_layers} layers")
            mapped = iter([_pages_in(storages, place, like) for place, like in zip(shared.places, likes)])
            self._other = [[next(mapped) for _ in layer] for layer in self._layout]
        super()._apply(frame, payload)

    def _map(self, memory: Memory) -> Any:
        """The storage that the other end shares. Raises `Refused` for anything else."""
        if (memory.of_gpu is not None) != self._layout[0][0].is_cuda:
            raise Refused("memory of another type of device")
        if memory.of_gpu is not None:
            torch.cuda.init()
            return torch.UntypedStorage._new_shared_cuda(*memory.of_gpu)
        _, files, _, _ = socket.recv_fds(self.connection, 1, 1)
        for file in files:
            try:
                found = os.fstat(file)
                if stat.S_ISREG(found.st_mode) and 0 < memory.size <= found.st_size:
                    return torch.UntypedStorage._new_shared_fd_cpu(  # type: ignore[attr-defined]
                        file, memory.size
                    )
            finally:
                os.close(file)
        raise Refused(f"no memory of {memory.size} bytes")

    # --8<-- [start:copy-into-shared-memory]
    def _copy(self, room: str, layer: int, source: list[int], target: list[int]) -> None:
        while self._other is None and not self._is_aborted(room):
            time.sleep(WAIT_SECONDS)  # the frame is on its way
        if self._other is not None and not self._is_aborted(room):
            pages = [pages[source] for pages in self._pages(layer)]
            self._put_pages(self._other[layer], target, pages)

    # --8<-- [end:copy-into-shared-memory]


def _pages_in(storages: Sequence[Any], place: Place, like: torch.Tensor) -> torch.Tensor:
    """Pages in mapped memory, as those of this pool are laid out. Raises `Refused` if they are not inside."""
    last = sum((size - 1) * stride for size, stride in zip(like.shape[1:], like.stride()[1:]))
    if not 0 <= place.memory < len(storages) or place.offset < 0 or place.num_pages < 1:
        raise Refused(f"no pages at {place}")
    storage = storages[place.memory]
    if place.offset + (place.num_pages - 1) * like.stride(0) + last >= storage.nbytes():
        raise Refused(f"pages at {place}, beyond memory of {storage.nbytes()} bytes")
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, place.offset, (place.num_pages, *like.shape[1:]), like.stride())
