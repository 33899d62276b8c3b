"""Who owns which slot: a check of all pools at once, quick enough to run after every step.

A slot is free, or a tree node's, or lies on a page that one live request allocated for itself: positions
[cache_protected_len, kv_allocated_len) of its row, to the end of the last page. Never two of these at once,
and never none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NoReturn

import torch

from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from diptych.shared.interfaces.prefix_cache import CacheNode, PrefixCache
from diptych.shared.interfaces.scheduler import SchedulerState
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.types import Req

NUM_SLOTS_SHOWN = 8


class InvariantViolation(AssertionError):
    """The pools, the prefix cache and the requests contradict one another."""


def check_invariants(
    state: SchedulerState,
    allocator: TokenToKVPoolAllocator,
    req_to_token_pool: ReqToTokenPool,
    tree_cache: PrefixCache,
) -> None:
    """Raise `InvariantViolation` unless, between two steps, every row and every slot has exactly one owner,
    nodes are locked by exactly the requests below them, rows agree with the tree, and all counters with
    what they count."""
    everyone = [*state.waiting_queue, *state.running]
    if state.chunked_req is not None:
        everyone.append(state.chunked_req)
    _Audit(everyone, allocator, req_to_token_pool, tree_cache).run()


def check_idle(
    allocator: TokenToKVPoolAllocator, req_to_token_pool: ReqToTokenPool, tree_cache: PrefixCache
) -> None:
    """`check_invariants` when no request is live: all rows free, all slots free or evictable."""
    check_invariants(SchedulerState(), allocator, req_to_token_pool, tree_cache)


@dataclass
class _Audit:
    everyone: list[Req]
    allocator: TokenToKVPoolAllocator
    req_to_token_pool: ReqToTokenPool
    tree_cache: PrefixCache

    def run(self) -> None:
        self._check_reqs()
        self._check_rows()
        self._check_nodes()
        self._check_locks()
        for req in self.live:
            self._check_prefix(req)
        self._check_slots()

    @cached_property
    def live(self) -> list[Req]:
        """The requests that own memory."""
        return [req for req in self.everyone if req.req_pool_idx is not None]

    @cached_property
    def nodes(self) -> dict[int, CacheNode]:
        return {node.node_id: node for node in self.tree_cache.nodes()}

    @property
    def num_in_use(self) -> int:
        """Slots that live requests own privately."""
        page_size = self.allocator.page_size
        num_tokens = sum(round_up_to_page(req.kv_allocated_len, page_size) for req in self.live)
        return num_tokens - sum(req.cache_protected_len for req in self.live)

    def path(self, req: Req) -> list[CacheNode]:
        """The nodes that a request uses, root side first."""
        node_id = 0 if req.last_node is None else self.tree_cache.node_id(req.last_node)
        path: list[CacheNode] = []
        while node_id != 0:
            if node_id not in self.nodes:
                self.fail(f"{req.rid}: node {node_id} of its path is not in the tree")
            path.append(self.nodes[node_id])
            node_id = path[-1].parent_id
        return path[::-1]

    def fail(self, problem: str) -> NoReturn:
        free, in_use = self.allocator.available_size(), self.num_in_use
        evictable, protected = self.tree_cache.evictable_size(), self.tree_cache.protected_size()
        raise InvariantViolation(
            f"{problem} [slots: free {free} + evictable {evictable} + protected {protected} + in use {in_use}"
            f" = {free + evictable + protected + in_use} of {self.allocator.size};"
            f" rows: free {self.req_to_token_pool.available_size()} + in use {len(self.live)}"
            f" of {self.req_to_token_pool.size}]"
        )

    def _check_reqs(self) -> None:
        for req, count in Counter(self.everyone).items():
            if count > 1:
                self.fail(f"{req.rid} is in {count} places of the scheduler at once")
            if req.req_pool_idx is None and req.kv_allocated_len > 0:
                self.fail(f"{req.rid} has {req.kv_allocated_len} slots and no row")
        for req in self.live:
            if not req.cache_protected_len <= req.kv_committed_len <= req.kv_allocated_len:
                self.fail(
                    f"{req.rid}: not protected {req.cache_protected_len} <= committed {req.kv_committed_len}"
                    f" <= allocated {req.kv_allocated_len}"
                )

    def _check_rows(self) -> None:
        rows = [req.req_pool_idx for req in self.live]
        for row, count in Counter(rows).items():
            if count > 1:
                self.fail(f"row {row} is allocated to {count} requests")
            if row is None or not 1 <= row <= self.req_to_token_pool.size:
                self.fail(f"row {row} is outside 1..{self.req_to_token_pool.size}")
        if len(rows) + self.req_to_token_pool.available_size() != self.req_to_token_pool.size:
            self.fail("rows in use and free rows do not add up")

    def _check_nodes(self) -> None:
        evictable = protected = 0
        for node in self.nodes.values():
            if node.lock_ref < 0:
                self.fail(f"node {node.node_id} has lock_ref {node.lock_ref}")
            if not node.key or len(node.key) != len(node.slots):
                self.fail(f"node {node.node_id} has {len(node.key)} tokens and {len(node.slots)} slots")
            if len(node.key) % self.allocator.page_size != 0:
                self.fail(f"node {node.node_id} has {len(node.key)} tokens: no whole pages")
            if node.lock_ref > 0:
                protected += len(node.slots)
            else:
                evictable += len(node.slots)
        if evictable != self.tree_cache.evictable_size() or protected != self.tree_cache.protected_size():
            self.fail(f"the tree holds {evictable} evictable and {protected} protected tokens")

    def _check_locks(self) -> None:
        users = Counter(node.node_id for req in self.live for node in self.path(req))
        for node in self.nodes.values():
            if node.lock_ref != users[node.node_id]:
                self.fail(
                    f"node {node.node_id} has lock_ref {node.lock_ref}, but the live requests that use it or"
                    f" a node below it are {users[node.node_id]}"
                )

    def _check_prefix(self, req: Req) -> None:
        """The first cache_protected_len tokens of a request are those of its path, in the tree's slots."""
        path = self.path(req)
        keys = [entry for node in path for entry in node.key]
        slots = [slot for node in path for slot in node.slots]
        num_protected = req.cache_protected_len
        if len(keys) != num_protected:
            self.fail(f"{req.rid}: cache_protected_len is {num_protected}, its path has {len(keys)} tokens")
        tokens = req.key_ids
        is_bigram = bool(keys) and isinstance(keys[0], tuple)
        if keys != (list(pairwise(tokens)) if is_bigram else tokens)[:num_protected]:
            self.fail(f"{req.rid}: the tokens of its path in the tree are not its own")
        if any(node.extra_key != req.extra_key for node in path):
            self.fail(f"{req.rid}: its path in the tree belongs to another extra_key than {req.extra_key!r}")
        assert req.req_pool_idx is not None
        row = self.req_to_token_pool.read(req.req_pool_idx, 0, num_protected).tolist()
        if row != slots:
            wrong = next(i for i in range(num_protected) if row[i] != slots[i])
            self.fail(f"{req.rid}: position {wrong} is slot {row[wrong]}, in the tree {slots[wrong]}")

    def _check_slots(self) -> None:
        free = self.allocator.free_slots().cpu()
        if len(free) != self.allocator.available_size():
            self.fail(f"the allocator lists {len(free)} free slots")
        others: list[int] = []
        for node in self.nodes.values():
            self._expect_pages(f"node {node.node_id}", 0, node.slots)
            others += node.slots
        for req in self.live:
            others += self._private_slots(req)
        owned = torch.cat([free, torch.tensor(others, dtype=torch.int64)])
        first, last = self.allocator.page_size, self.allocator.size + self.allocator.page_size - 1
        outside = owned[(owned < first) | (owned > last)]
        if len(outside) > 0:
            self.fail(f"slots {outside[:NUM_SLOTS_SHOWN].tolist()} are outside {first}..{last}")
        num_owners = torch.bincount(owned, minlength=last + 1)[first:]
        for problem, wrong in (("have several owners", num_owners > 1), ("have no owner", num_owners == 0)):
            if wrong.any():
                slots = (wrong.nonzero().flatten() + first).tolist()
                shown = ", ".join(map(str, slots[:NUM_SLOTS_SHOWN]))
                self.fail(f"{len(slots)} slots {problem}: {shown}{' ...' * (len(slots) > NUM_SLOTS_SHOWN)}")

    def _private_slots(self, req: Req) -> list[int]:
        """All slots of the pages that a request owns, also those behind its last token."""
        start, end, page_size = req.cache_protected_len, req.kv_allocated_len, self.allocator.page_size
        assert req.req_pool_idx is not None
        slots = self.req_to_token_pool.read(req.req_pool_idx, start, end).tolist()
        self._expect_pages(f"{req.rid}'s row", start, slots)
        num_missing = -len(slots) % page_size
        return slots + [slots[-1] + 1 + i for i in range(num_missing)] if slots else []

    def _expect_pages(self, name: str, start: int, slots: list[int]) -> None:
        """Slots of the positions from `start` on must fill pages from their first slot, in order."""
        page_size = self.allocator.page_size
        if page_size == 1:
            return
        for i, slot in enumerate(slots):
            offset = (start + i) % page_size
            in_order = slot % page_size == offset and (i == 0 or offset == 0 or slot == slots[i - 1] + 1)
            if not in_order:
                self.fail(f"{name}: position {start + i} is slot {slot}: not in its page's order")
