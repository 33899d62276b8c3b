"""Replicas that share experts and go on without one that has died.

The controller tells the others who is left. A rank that misses a dead one in a collective leaves its groups,
so each rank that waits for this one misses it too, and so on: none waits for the time limit. A rank that has
nothing to do learns of it from the controller alone. All meet in a new store, form smaller groups, place the
experts anew, and repeat the pass of those that have not completed it.

A replica of several ranks dies as a whole: each has a part of its attention and of its KV. Its ranks complete
a pass together: they meet behind it. One that comes late out of this meeting may miss another rank there,
while the others are in the next pass already: it has completed its own, and begins the next one as they
repeat it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.grid import groups_of
from diptych.shared.parallel.meeting import open_store
from diptych.shared.parallel.patience import POLL_SECONDS

T = TypeVar("T")
CALL_SECONDS = 10.0
"""For which a rank that misses another one waits for the controller's call."""
CONNECT_SECONDS = 2.0
"""Time limit of forming a group, whose ranks have all met. gloo takes five times as long for a rank that has
died since. If a rank was only slow, all try again."""


class Members(NamedTuple):
    """Who is left. A later list has a larger number."""

    number: int
    replicas: list[int]  # by their numbers at the start
    path: str  # of the store in which they meet


UNFINISHED, IN_MEETING, COMPLETE = range(3)
"""How far a rank has come in its latest pass: IN_MEETING waits for the others of its replica behind it."""


class Survivors:
    """The groups of one rank, as they become smaller. `hear` may be called by another thread."""

    def __init__(
        self,
        ranks: Collectives,
        experts: ExpertManager,
        have_regrouped: Callable[[], None],
        seconds: float,
    ) -> None:
        """have_regrouped: called when the group is another one. seconds: the time limit of forming it."""
        self.ranks = ranks
        self.experts = experts
        self.have_regrouped = have_regrouped
        self.seconds = seconds
        self.tp = ranks.grid.tp if ranks.grid else None  # of this replica
        self.num_parts = self.tp.size if self.tp else 1
        self.own_replica, self.own_part = divmod(ranks.rank, self.num_parts)
        self.is_torn: Callable[[], bool] = lambda: False  # whether another rank of this replica has ended
        placed, num_logical = experts.experts.physical_to_logical, experts.experts.num_replicas.shape[1]
        # That have room for all experts. Another thread asks while this one moves them.
        least_ranks = -(-num_logical // (placed.shape[1] // experts.ep))
        self.least_replicas = -(-least_ranks // self.num_parts)
        self.joined = 0  # the number of the list that this rank has followed
        self._members = Members(0, list(range(ranks.size // self.num_parts)), "")
        self._have_changed = threading.Condition()

    def hear(self, members: Members) -> None:
        with self._have_changed:
            self._members = max(members, self._members)
            self._have_changed.notify_all()

    @property
    def are_behind(self) -> bool:
        """Whether there is a list that this rank has not followed."""
        return self._members.number > self.joined

    # --8<-- [start:repeat-the-pass]
    def to_the_end(self, run: Callable[[], T], take_part: Callable[[], None], num_passes: int) -> T:
        """Run a pass to its end. A repeated one writes the same KV into the same slots,
        and all ranks of a replica sample again, or none."""
        state = UNFINISHED
        while True:
            try:
                if state == COMPLETE:
                    take_part()  # while others repeat it
                else:
                    result = run()
                    state = IN_MEETING
                    if self.tp is not None:
                        self.tp.all_reduce(torch.zeros(1))
                return result
            except RuntimeError as error:
                self._forgive(error)
            repeats, others_repeat = self._regroup(num_passes, state)
            state = UNFINISHED if repeats else COMPLETE
            if not others_repeat:
                return result

    # --8<-- [end:repeat-the-pass]

    def catch_up(self, take_part: Callable[[], None], num_passes: int) -> None:
        """Between two passes: let the others repeat one that this rank has completed."""
        while self.are_behind and self._regroup(num_passes, COMPLETE)[1]:
            try:
                take_part()
            except RuntimeError as error:
                self._forgive(error)
                self._wait_for_members()

    def _forgive(self, error: RuntimeError) -> None:
        """After an error in a pass: raise it again, unless it is that of a collective."""
        if not any(group.is_broken for group in groups_of(self.ranks)):
            raise error
        traceback.clear_frames(error.__traceback__)  # they hold a group, which ends now
        self._leave()

    def _leave(self) -> None:
        for group in groups_of(self.ranks):
            group.leave()

    def _regroup(self, num_passes: int, state: int) -> tuple[bool, bool]:
        """Go on with the ranks that are left. Returns whether this replica has a pass to repeat, and whether
        any has. Raises `RuntimeError` if the controller knows of no replica that has died."""
        self._leave()
        self._wait_for_members()
        start, experts = time.monotonic(), self.experts
        before, num_moved, num_reloaded = experts.numbers, experts.num_moved, experts.num_reloaded
        attempt, end = 0, start
        while True:
            members = self._members
            if members.number > self.joined:
                self.joined, attempt, end = members.number, 0, time.monotonic() + self.seconds
            try:
                self._meet(members, attempt, end)
                repeats = self._take_over(members, num_passes, state)
                got = torch.tensor([[experts.num_moved - num_moved, experts.num_reloaded - num_reloaded]])
                counts = self.ranks.all_gather(got).sum(0).tolist()
            except RuntimeError as error:  # another one may have died meanwhile, or one was slow
                self._forgive(error)
                if self.is_torn() or (not self.are_behind and time.monotonic() > end):
                    raise
                attempt += 1
                continue
            if self.ranks.rank == 0:
                died = sorted({number // self.num_parts for number in before} - {*members.replicas})
                print(
                    f"replica {_listed(died)} died; its experts are with {_listed(members.replicas)}: "
                    f"{counts[0]} moved, {counts[1]} tensors read again, {time.monotonic() - start:.1f} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            return repeats

    # --8<-- [start:regroup]
    def _take_over(self, members: Members, num_passes: int, state: int) -> tuple[bool, bool]:
        """Place the experts. Returns whether the replica repeats the pass, and any does."""
        experts = self.experts
        own = [num_passes, state, experts.num_passes, experts.num_moves, experts.is_whole]
        of_all = self.ranks.all_gather(torch.tensor([own])).T
        passes, states, experts_passes, moves, are_whole = of_all.tolist()
        behind = {state for each, state in zip(passes, states) if each < max(passes)}
        may_go_on = max(passes) - min(passes) <= 1 and UNFINISHED not in behind
        assert may_go_on, f"{members.replicas} are in passes {passes}: {states}"
        repeat = (of_all[1].view(-1, self.num_parts) == UNFINISHED).any(1).tolist()
        experts.num_passes = max(experts_passes)  # a pass that is repeated counts twice
        numbers = [i * self.num_parts + part for i in members.replicas for part in range(self.num_parts)]
        experts.keep(numbers, is_known=len(set(moves)) == 1 and all(are_whole))
        self.have_regrouped()
        if num_passes < max(passes):
            return False, False
        return repeat[members.replicas.index(self.own_replica)], any(repeat)

    # --8<-- [end:regroup]

    def _wait_for_members(self) -> None:
        end = time.monotonic() + CALL_SECONDS
        with self._have_changed:
            while not self._have_changed.wait_for(lambda: self.are_behind, POLL_SECONDS):
                if self.is_torn() or time.monotonic() > end:
                    raise RuntimeError("a collective has failed, and no other replica is known to have ended")

    def _meet(self, members: Members, attempt: int, end: float) -> None:
        """Join the group of the ranks that are left. A slow rank may miss the time limit of joining: then no
        rank gets behind the first collective, which needs all, and all of this list come to the next attempt.
        Each has a part of the store, in which no other group has met."""
        from torch.distributed import PrefixStore

        place, num, parts = members.replicas.index(self.own_replica), len(members.replicas), self.num_parts
        rank, size = place * parts + self.own_part, num * parts
        store = PrefixStore(f"attempt {attempt}", open_store(members.path, size))
        store.set(f"rank {rank}", "")
        while not store.check([f"rank {peer}" for peer in range(size)]):
            if self.are_behind or self.is_torn() or time.monotonic() > end:
                raise RuntimeError(f"not all of the replicas {members.replicas} have come")
            time.sleep(POLL_SECONDS)
        places = (("all", rank, size), (f"replica {place}", self.own_part, parts),
                  (f"part {self.own_part}", place, num))  # fmt: skip
        for group, (name, number, of) in zip(groups_of(self.ranks), places):
            group.rejoin(PrefixStore(name, store), number, of, CONNECT_SECONDS)


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
