"""The queue of waiting requests: taking one out of the middle costs the same at ten and at ten thousand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from diptych.shared.types import Req


class Changes(NamedTuple):
    """Each request with its ticket. Who left is not in `joined`, unless it came back, with a new ticket."""

    joined: dict[Req, int]
    left: dict[Req, int]


@dataclass(eq=False)
class Follower:
    """Collects who joins a queue and who leaves it, for a policy that keeps an order of its own."""

    _joined: dict[Req, int] = field(default_factory=dict)
    _left: dict[Req, int] = field(default_factory=dict)

    def take(self) -> Changes:
        """What changed since the last call."""
        changes = Changes(self._joined, self._left)
        self._joined, self._left = {}, {}
        return changes

    def note_joined(self, req: Req, ticket: int) -> None:
        self._joined[req] = ticket

    def note_left(self, req: Req, ticket: int) -> None:
        if self._joined.pop(req, None) is None:  # else it came and went unseen
            self._left[req] = ticket


class WaitingQueue(Sequence[Req]):
    """Distinct requests in the order in which they came. Each gets a ticket when it joins: smaller tickets
    came earlier. What a policy orders by (tokens, priority, queue_start_time, max_new_tokens, the keys) does
    not change while a request waits.

    Joining, leaving, `in`, `len` and [-1] take constant time, a copy as a list some nanoseconds a request.
    """

    def __init__(self, reqs: Iterable[Req] = ()) -> None:
        self._tickets: dict[Req, int] = {}
        self._next_ticket = 0
        self._followers: list[Follower] = []
        for req in reqs:
            self.append(req)

    def append(self, req: Req) -> None:
        assert req not in self._tickets, f"{req.rid} waits already"
        self._tickets[req] = self._next_ticket
        for follower in self._followers:
            follower.note_joined(req, self._next_ticket)
        self._next_ticket += 1

    def remove(self, req: Req) -> None:
        """Raises KeyError for a request that does not wait."""
        ticket = self._tickets.pop(req)
        for follower in self._followers:
            follower.note_left(req, ticket)

    def follow(self) -> Follower:
        """Its first `take` gives all who wait now."""
        follower = Follower(dict(self._tickets))
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def __contains__(self, req: object) -> bool:
        return req in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._tickets)

    def __reversed__(self) -> Iterator[Req]:
        return reversed(self._tickets)

    @overload
    def __getitem__(self, index: int) -> Req: ...
    @overload
    def __getitem__(self, index: slice) -> list[Req]: ...
    def __getitem__(self, index: int | slice) -> Req | list[Req]:
        if index == -1 and self._tickets:
            return next(reversed(self._tickets))
        return list(self._tickets)[index]
