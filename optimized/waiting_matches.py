"""The match of each waiting request in the prefix tree, kept from pass to pass.

The reference matches every waiting request again in every pass. Here a request is matched when it joins the
queue, and again only when its match changes: the tree reports that (`CacheWatcher`). In a tree that does not
report changes, all requests are matched again in each pass.

Shared prefixes are found without a tree. Two requests share n tokens exactly if their first n tokens are
equal, so a dictionary with these tokens as keys groups the requests with the same prefix. The first of them
computes it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from diptych.optimized.waiting_forest import NO_NODE, Forest
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import CacheWatcher, PrefixCache, RadixKey, WatchablePrefixCache
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.scheduling.waiting_queue import Changes
from diptych.shared.types import Req


@dataclass(eq=False, slots=True)
class Match:
    ticket: int
    length: int
    node: Any  # the last node of the match
    node_id: int
    next_page: Hashable | None  # a leaf below `node` with this key would make the match longer
    shared_prefix: Hashable | None  # equal for requests that would compute it; None: enough is cached


class WaitingMatches(CacheWatcher):
    """`deprioritized`: rids of requests that share a prefix that another request computes in this step."""

    def __init__(self, config: EngineConfig, tree_cache: PrefixCache, is_depth_first: bool) -> None:
        self.tree_cache = tree_cache
        self.check_threshold = config.in_batch_prefix_check_threshold
        page_size = tree_cache.page_size
        # Tokens of a page, and of a prefix that is long enough to wait for: for bigrams one more.
        self.page_len = page_size + tree_cache.is_bigram
        self.shares_anything = config.in_batch_prefix_deprioritize_threshold <= 0
        num_shared = round_up_to_page(config.in_batch_prefix_deprioritize_threshold, page_size)
        self.shared_len = num_shared + tree_cache.is_bigram
        self.is_depth_first = is_depth_first
        self.watched = tree_cache if isinstance(tree_cache, WatchablePrefixCache) else None
        if self.watched is not None:
            self.watched.watch(self)
        self.clear()

    def clear(self) -> None:
        self.by_req: dict[Req, Match] = {}
        self.by_ticket: dict[int, Req] = {}
        self.deprioritized: set[str] = set()
        self.forest = Forest()
        self._sharers: dict[Hashable, list[int]] = {}  # tickets, ascending: the first computes
        self._ending_at: dict[Any, dict[Hashable | None, dict[Req, None]]] = {}
        self._stale: dict[Req, None] = {}  # requests to match again: in `by_req`, not in `_ending_at`

    def update(self, changes: Changes) -> None:
        """Bring the matches up to date with the queue and the tree."""
        for req in changes.left:
            self._drop(req)
        tickets = {
            req: self.by_req[req].ticket for req in (self.by_req if self.watched is None else self._stale)
        }
        for req in tickets:
            self._drop(req)
        self._stale = {}
        tickets |= changes.joined
        for req, ticket in tickets.items():
            self._match(req, ticket)
        if self.is_depth_first:
            parents = self._parents() if self.watched is None else {}
            for req, ticket in tickets.items():
                self.forest.add(ticket, self._path(self.by_req[req], parents))

    def depth_first(self) -> Iterator[Req]:
        """The order of dfs-weight. Deprioritized requests come last, in the same order among themselves."""
        last: list[Req] = []
        for ticket in self.forest.walk():
            req = self.by_ticket[ticket]
            if req.rid in self.deprioritized:
                last.append(req)
            else:
                yield req
        yield from last

    def inserted(self, parent: Any, key: Hashable) -> None:
        self._stale |= self._ending_at.get(parent, {}).pop(key, {})

    def split(self, upper: Any, lower: Any) -> None:
        self.forest.split(self.tree_cache.node_id(upper), self.tree_cache.node_id(lower))

    def removed(self, leaf: Any) -> None:
        for reqs in self._ending_at.pop(leaf, {}).values():
            self._stale |= reqs

    def reset(self) -> None:
        self.forest = Forest()  # a reset tree numbers its nodes from 0 again
        for match in self.by_req.values():
            match.node_id = NO_NODE
        self._ending_at = {}
        self._stale = dict.fromkeys(self.by_req)

    def _match(self, req: Req, ticket: int) -> None:
        token_ids = req.key_ids
        key = RadixKey(token_ids, req.extra_key, self.tree_cache.is_bigram)
        slots, node = self.tree_cache.match_prefix(key)
        page = token_ids[len(slots) : len(slots) + self.page_len]
        next_page = (req.extra_key, *page) if len(page) == self.page_len else None
        match = Match(ticket, len(slots), node, self.tree_cache.node_id(node), next_page, None)
        self.by_req[req] = match
        self.by_ticket[ticket] = req
        self._ending_at.setdefault(node, {}).setdefault(next_page, {})[req] = None
        if match.length <= self.check_threshold:
            if self.shares_anything:
                self.deprioritized.add(req.rid)
            elif len(token_ids) >= self.shared_len:
                match.shared_prefix = (req.extra_key, *token_ids[: self.shared_len])
                self._join_sharers(req, match)

    def _drop(self, req: Req) -> None:
        match = self.by_req.pop(req)
        del self.by_ticket[match.ticket]
        if req in self._stale:
            del self._stale[req]
        else:
            at_node = self._ending_at[match.node]
            del at_node[match.next_page][req]
            if not at_node[match.next_page]:
                del at_node[match.next_page]
            if not at_node:
                del self._ending_at[match.node]
        if self.is_depth_first:
            self.forest.remove(match.ticket, match.node_id)
        if match.shared_prefix is not None:
            self._leave_sharers(match)
        self.deprioritized.discard(req.rid)

    def _join_sharers(self, req: Req, match: Match) -> None:
        tickets = self._sharers.setdefault(match.shared_prefix, [])
        insort(tickets, match.ticket)
        if tickets[0] != match.ticket:
            self.deprioritized.add(req.rid)
        elif len(tickets) > 1:
            self.deprioritized.add(self.by_ticket[tickets[1]].rid)

    def _leave_sharers(self, match: Match) -> None:
        tickets = self._sharers[match.shared_prefix]
        tickets.pop(bisect_left(tickets, match.ticket))
        if tickets:
            self.deprioritized.discard(self.by_ticket[tickets[0]].rid)
        else:
            del self._sharers[match.shared_prefix]

    def _parents(self) -> dict[int, int]:
        return {node.node_id: node.parent_id for node in self.tree_cache.nodes()}

    def _path(self, match: Match, parents: dict[int, int]) -> list[int]:
        """Numbers of the nodes from the root's child down to the last node of the match."""
        path: list[int] = []
        if self.watched is not None:
            node = match.node
            while (above := self.watched.parent(node)) is not None:
                path.append(self.watched.node_id(node))
                node = above
        else:
            node_id = match.node_id
            while node_id in parents:
                path.append(node_id)
                node_id = parents[node_id]
        return path[::-1]
