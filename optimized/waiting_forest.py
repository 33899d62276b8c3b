"""Waiting requests in the depth-first order of the prefix tree, heaviest subtree first (dfs-weight)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NO_NODE = -1
"""The number of a node of a tree that was reset since."""


@dataclass(eq=False, slots=True)
class Subtree:
    """A node of the tree at or below which the match of a waiting request ends."""

    node_id: int
    parent: Subtree | None
    tickets: list[int] = field(default_factory=list)  # of these requests, ascending; not kept for the root
    own: list[int] = field(default_factory=list)  # of the requests whose match ends here, ascending
    children: list[tuple[int, int, Subtree]] = field(default_factory=list)  # (*place, child), sorted

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of siblings: the heaviest first, then the one with the longest waiting request."""
        return -len(self.tickets), self.tickets[0]


class Forest:
    """The subtrees that hold matches of waiting requests. Adding or removing a request takes time in
    proportion to its depth, not to the number of waiting requests, except for moving pointers in a list."""

    def __init__(self) -> None:
        self.root = Subtree(0, None)
        self.by_id = {0: self.root}

    def add(self, ticket: int, path: Sequence[int]) -> None:
        """`path`: numbers of the nodes from the root's child down to the end of the request's match."""
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
        _remove_from(subtree.own, ticket)
        while subtree.parent is not None:
            self._unlist(subtree)
            _remove_from(subtree.tickets, ticket)
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
        """Yields the tickets in order. Lists are copied when entered, because nodes may be split during the
        walk."""
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
        siblings.pop(bisect_left(siblings, child.place))


def _remove_from(tickets: list[int], ticket: int) -> None:
    i = bisect_left(tickets, ticket)
    assert i < len(tickets), f"no ticket {ticket}"
    assert tickets[i] == ticket, f"no ticket {ticket}"
    tickets.pop(i)
