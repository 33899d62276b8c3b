"""Where in the tree the tokens of each waiting request end, kept from pass to pass.

The reference matches every waiting request anew in every pass. Here a request is matched when it joins, and
again only when its match would end elsewhere: the tree reports it (`CacheWatcher`). A tree without
notifications is matched anew each time.

Finding requests that share a prefix takes no tree: two requests share n tokens exactly if their first n
tokens are equal. So a dictionary by those tokens holds all requests with one prefix, and the first of them
computes it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.config import EngineConfig
from shared.interfaces import CacheWatcher, PrefixCache, RadixKey, WatchablePrefixCache
from shared.scheduling.pages import round_up_to_page
from shared.scheduling.waiting_queue import Changes
from shared.types import Req

NO_NODE = -1
"""In place of a number that was given to a node before the tree was reset."""


@dataclass(eq=False, slots=True)
class Match:
    ticket: int
    matched_len: int
    node: Any  # the last one
    node_id: int
    next_page: Hashable | None  # a leaf below `node` that is found by this would lengthen the match
    shared_prefix: Hashable | None  # equal for those who would compute the same; None: the cache has enough


class WaitingMatches(CacheWatcher):
    """`put_off`: rids of those who share a prefix that another one computes now."""

    def __init__(self, config: EngineConfig, tree_cache: PrefixCache, is_depth_first: bool) -> None:
        self.tree_cache = tree_cache
        self.check_threshold = config.in_batch_prefix_check_threshold
        page_size = tree_cache.page_size
        # Tokens of a page, and of a prefix that is worth waiting for: of bigrams one more.
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
        self.put_off: set[str] = set()
        self.forest = Forest()
        self._sharers: dict[Hashable, list[int]] = {}  # tickets, ascending: the first one is not put off
        self._ending_at: dict[Any, dict[Hashable | None, dict[Req, None]]] = {}
        self._stale: dict[Req, None] = {}  # these are in `by_req`, and no longer in `_ending_at`

    def update(self, changes: Changes) -> None:
        """Bring everything up to date with the queue and the tree."""
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
        """Those who are put off come last, in the same order among themselves."""
        last: list[Req] = []
        for ticket in self.forest.walk():
            req = self.by_ticket[ticket]
            if req.rid in self.put_off:
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
        self.forest = Forest()  # the tree numbers its nodes anew
        for match in self.by_req.values():
            match.node_id = NO_NODE
        self._ending_at = {}
        self._stale = dict.fromkeys(self.by_req)

    def _match(self, req: Req, ticket: int) -> None:
        token_ids = req.all_ids
        key = RadixKey(token_ids, req.extra_key, self.tree_cache.is_bigram)
        found = self.tree_cache.match_prefix(key)
        matched_len, node = len(found.device_indices), found.last_node
        page = token_ids[matched_len : matched_len + self.page_len]
        next_page = (req.extra_key, *page) if len(page) == self.page_len else None
        match = Match(ticket, matched_len, node, self.tree_cache.node_id(node), next_page, None)
        self.by_req[req] = match
        self.by_ticket[ticket] = req
        self._ending_at.setdefault(node, {}).setdefault(next_page, {})[req] = None
        if matched_len <= self.check_threshold:
            if self.shares_anything:
                self.put_off.add(req.rid)
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
        self.put_off.discard(req.rid)

    def _join_sharers(self, req: Req, match: Match) -> None:
        tickets = self._sharers.setdefault(match.shared_prefix, [])
        insort(tickets, match.ticket)
        if tickets[0] != match.ticket:
            self.put_off.add(req.rid)
        elif len(tickets) > 1:
            self.put_off.add(self.by_ticket[tickets[1]].rid)

    def _leave_sharers(self, match: Match) -> None:
        tickets = self._sharers[match.shared_prefix]
        tickets.pop(bisect_left(tickets, match.ticket))
        if tickets:
            self.put_off.discard(self.by_ticket[tickets[0]].rid)
        else:
            del self._sharers[match.shared_prefix]

    def _parents(self) -> dict[int, int]:
        return {node.node_id: node.parent_id for node in self.tree_cache.nodes()}

    def _path(self, match: Match, parents: dict[int, int]) -> list[int]:
        """Numbers of the nodes down to a match's last one, without the root's."""
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


@dataclass(eq=False, slots=True)
class Subtree:
    """A node that waiting requests end at or below."""

    node_id: int
    parent: Subtree | None
    tickets: list[int] = field(default_factory=list)  # of all of them, ascending; the root's are not kept
    own: list[int] = field(default_factory=list)  # of those who end here, ascending
    children: list[tuple[int, int, Subtree]] = field(default_factory=list)  # sorted by the first two:

    @property
    def place(self) -> tuple[int, int]:
        """Among its parent's children the heaviest first, then by who waits longest."""
        return -len(self.tickets), self.tickets[0]


class Forest:
    """The nodes that waiting requests end at, in the order of dfs-weight. A request that joins or leaves
    costs its depth, not the number of those who wait (but for moving pointers of a list)."""

    def __init__(self) -> None:
        self.root = Subtree(0, None)
        self.by_id = {0: self.root}

    def add(self, ticket: int, path: Sequence[int]) -> None:
        """`path`: numbers of the nodes from below the root down to where the request's match ends."""
        subtree = self.root
        for node_id in path:
            child = self.by_id.get(node_id)
            if child is None:
                child = self.by_id[node_id] = Subtree(node_id, subtree)
            else:
                self._unlist(child)
            insort(child.tickets, ticket)
            self._list(child)
            subtree = child
        insort(subtree.own, ticket)

    def remove(self, ticket: int, node_id: int) -> None:
        subtree = self.by_id.get(node_id)
        if subtree is None:
            assert node_id == NO_NODE
            return
        _take_out(subtree.own, ticket)
        while subtree.parent is not None:
            self._unlist(subtree)
            _take_out(subtree.tickets, ticket)
            if subtree.tickets:
                self._list(subtree)
            else:
                del self.by_id[subtree.node_id]
            subtree = subtree.parent

    def split(self, upper_id: int, lower_id: int) -> None:
        lower = self.by_id.get(lower_id)
        if lower is None:
            return
        assert lower.parent is not None, "the root is not split"
        upper = self.by_id[upper_id] = Subtree(upper_id, lower.parent, list(lower.tickets))
        self._unlist(lower)
        self._list(upper)
        lower.parent = upper
        self._list(lower)

    def walk(self) -> Iterator[int]:
        """Tickets. What is entered is copied first: the tree may change meanwhile, and nodes be split."""
        stack = [(self.root, iter(list(self.root.children)))]
        while stack:
            subtree, children = stack[-1]
            entry = next(children, None)
            if entry is None:
                stack.pop()
                yield from list(subtree.own)
            else:
                stack.append((entry[2], iter(list(entry[2].children))))

    def _list(self, child: Subtree) -> None:
        assert child.parent is not None
        insort(child.parent.children, (*child.place, child))

    def _unlist(self, child: Subtree) -> None:
        assert child.parent is not None
        siblings = child.parent.children
        siblings.pop(bisect_left(siblings, child.place))  # type: ignore[type-var]


def _take_out(tickets: list[int], ticket: int) -> None:
    i = bisect_left(tickets, ticket)
    assert i < len(tickets), f"no ticket {ticket}"
    assert tickets[i] == ticket, f"no ticket {ticket}"
    tickets.pop(i)
