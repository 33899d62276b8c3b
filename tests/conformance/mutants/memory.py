"""Planted bugs in the memory pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from diptych.reference import memory_pool
from diptych.reference.memory_pool import ReqToTokenPool, TokenToKVPool, TokenToKVPoolAllocator
from tests.conformance.mutants.mutant import bugs_in, module_with, plant
from tests.planted import Bug


def pool_mutant(pool: type) -> Bug:
    """The module of pools, with this subclass in place of its base class."""
    return plant("memory_pool", module_with(memory_pool, **{pool.__base__.__name__: pool}), pool)


@pool_mutant
class HandsOutTheDummyPage(TokenToKVPoolAllocator):
    """Page 0 is allocated like the others, and padding overwrites it."""

    def clear(self) -> None:
        super().clear()
        self._free_pages = deque(range(self.size // self.page_size))


@pool_mutant
class AcceptsADoubleFree(TokenToKVPoolAllocator):
    """A page freed twice is free twice, and gets two owners."""

    def free(self, slots: torch.Tensor) -> None:
        self._used_pages |= {slot // self.page_size for slot in slots.tolist()}
        super().free(slots)


@pool_mutant
class ChecksAfterTaking(TokenToKVPoolAllocator):
    """When pages do not suffice, those that there were are gone all the same."""

    def _take_pages(self, num_pages: int) -> list[int] | None:
        if num_pages > len(self._free_pages):
            super()._take_pages(len(self._free_pages))
            return None
        return super()._take_pages(num_pages)


@pool_mutant
class DecodesOneByOne(TokenToKVPoolAllocator):
    """alloc_decode serves requests in turn: those before the one that does not fit keep their pages."""

    def alloc_decode(self, seq_lens, last_locs) -> torch.Tensor | None:
        given = [self.alloc_extend([n - 1], [n], [loc]) for n, loc in zip(seq_lens, last_locs)]
        if any(slots is None for slots in given):
            return None
        return torch.cat(given) if given else self.alloc(0)


@pool_mutant
class TakesAPageTooMany(TokenToKVPoolAllocator):
    """A request that ends on a page's last slot takes the next page already."""

    def alloc_extend(self, prefix_lens, seq_lens, last_locs) -> torch.Tensor | None:
        given = super().alloc_extend(prefix_lens, seq_lens, last_locs)
        if given is not None and any(n and n % self.page_size == 0 for n in seq_lens):
            self._take_pages(min(1, len(self._free_pages)))
        return given


@pool_mutant
class ListsFreeSlotsAsTheyCame(TokenToKVPoolAllocator):
    """free_slots is not sorted."""

    def free_slots(self) -> torch.Tensor:
        return self._slots_of(self._free_pages)


@pool_mutant
class RowsLastInFirstOut(ReqToTokenPool):
    """A row that was just freed is allocated at once, while a step in flight still writes to it."""

    def free(self, req_pool_indices) -> None:
        super().free(req_pool_indices)
        for _ in req_pool_indices:
            self._free_rows.rotate(1)


@pool_mutant
class HandsOutRowZero(ReqToTokenPool):
    """The dummy row belongs to a request."""

    def clear(self) -> None:
        super().clear()
        self._free_rows = deque(range(self.size))


@pool_mutant
class AcceptsARowTwice(ReqToTokenPool):
    """A row freed twice is free twice."""

    def free(self, req_pool_indices) -> None:
        self._used_rows.update(req_pool_indices)
        super().free(req_pool_indices)


@pool_mutant
class ReadsAView(ReqToTokenPool):
    """What was read changes when the row does."""

    def __init__(self, size: int, max_len: int, device: torch.device | str) -> None:
        super().__init__(size, max_len, device)
        self._wide = self.req_to_token.to(torch.int64)

    def write(self, req_pool_idx: int, start: int, slots: torch.Tensor) -> None:
        super().write(req_pool_idx, start, slots)
        self._wide[req_pool_idx, start : start + len(slots)] = slots

    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        return self._wide[req_pool_idx, start:end]


def each_slot(move: Callable[..., None]) -> Callable[..., None]:
    """A move that does its pairs one after the other."""

    def moved(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        for target, source in zip(target_slots, source_slots):
            move(self, target[None], source[None])

    return moved


@pool_mutant
class MoveOverwritesSources(TokenToKVPool):
    """Slots are moved one by one: a source may be a target that was written before."""

    move = each_slot(TokenToKVPool.move)


@pool_mutant
class MovesOneLayer(TokenToKVPool):
    """Only the first layer's KV moves."""

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        for buffer in (self._k, self._v):
            buffer[0, target_slots] = buffer[0, source_slots]


@pool_mutant
class StoresAsIfContiguous(TokenToKVPool):
    """k and v are read as if they were dense in memory, which parts of a merged tensor are not."""

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        strides = (k[0].numel(), k.shape[2], 1)
        super().store(layer_id, out_cache_loc, k.as_strided(k.shape, strides), v.as_strided(v.shape, strides))


@pool_mutant
class CountsOneLayer(TokenToKVPool):
    """num_bytes_per_token is that of one layer."""

    @property
    def num_bytes_per_token(self) -> int:
        return super().num_bytes_per_token // self.num_layers


bug = bugs_in("memory_pool", "reference.memory_pool", folder="reference.")
# fmt: off
bug("GivesTheRowsThatThereAre", "Fewer rows than asked for are allocated.",
    ("memory_pool", "if num_reqs > len(self._free_rows):\n            return None\n",
     "num_reqs = min(num_reqs, len(self._free_rows))\n"))
bug("BuffersAreCopies", "What is written through a buffer does not reach the pool.",
    ("memory_pool", "return self._k[layer_id]", "return self._k[layer_id].clone()"))
bug("StoresKTwice", "K goes to both buffers.", ("memory_pool", "= v.to(self.dtype)", "= k.to(self.dtype)"))
bug("StoresOneTypeOnly", "K of another type than the pool's is refused.",
    ("memory_pool", "= k.to(self.dtype)", "= k"))
bug("RefusesPadding", "Two tokens of a step may not go to one slot, not even the dummy page's.",
    ("memory_pool", "        if self.dtype in FP8_TYPES:",
     "        assert len(out_cache_loc.unique()) == len(out_cache_loc)\n        if self.dtype in FP8_TYPES:"))
bug("HalfAPageOver", "A size that ends within a page is accepted.",
    ("memory_pool", " or size % page_size != 0", ""))
bug("AllocatesPartsOfPages", "A number of tokens that is no whole page is rounded down.",
    ("memory_pool",
     'assert num_tokens % self.page_size == 0, f"{num_tokens} tokens, page_size {self.page_size}"',
     "pass"))
bug("FreesAnyRow", "A row that is not allocated can be freed.",
    ("memory_pool", "assert row in self._used_rows,", "assert row <= self.size,"),
    ("memory_pool", "self._used_rows.remove(row)", "self._used_rows.discard(row)"))
bug("ClearKeepsRows", "clear leaves rows allocated.",
    ("memory_pool", "self._free_rows = deque(range(1, self.size + 1))",
     'self._free_rows = getattr(self, "_free_rows", deque(range(1, self.size + 1)))'))
bug("ClearKeepsPages", "clear leaves pages allocated.",
    ("memory_pool", "self._free_pages = deque(range(1, self.size // self.page_size + 1))",
     'self._free_pages = getattr(self, "_free_pages", deque(range(1, self.size // self.page_size + 1)))'))
bug("SharesTheLastNewPage", "The next request of a batch begins on the page on which the one before ends.",
    ("memory_pool", "num_taken += round_up_to_page(num_left, page_size)", "num_taken += num_left"))
