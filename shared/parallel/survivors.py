"""Replicas that share experts and go on without one that has died.

The controller tells the others who is left. A rank that misses the dead one in a collective leaves the group,
so each rank that waits for this one misses it too, and so on: none waits for the time limit. A rank that has
nothing to do learns of it from the controller alone. All meet in a new store, form a smaller group, place the
experts anew, and repeat the pass of those that have not completed it.
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
    ranks: list[int]  # by their numbers at the start
    path: str  # of the store in which they meet


class Survivors:
    """The group of one rank, as it becomes smaller. `hear` may be called by another thread."""

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
        self.own_number = ranks.rank
        placed, num_logical = experts.experts.physical_to_logical, experts.experts.num_replicas.shape[1]
        # That have room for all experts. Another thread asks while this one moves them.
        self.least_ranks = -(-num_logical // (placed.shape[1] // experts.ep))
        self.joined = 0  # the number of the list that this rank has followed
        self._members = Members(0, list(range(ranks.size)), "")
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
    def to_the_end(self, run: Callable[[], T], num_passes: int) -> T:
        """Run a pass to its end. A repeated one writes the same KV into the same slots,
        and samples for the first time: no collective follows the sampler."""
        while True:
            try:
                return run()
            except RuntimeError as error:
                self._forgive(error)
            self._regroup(num_passes, has_pass=True)

    def catch_up(self, take_part: Callable[[], None], num_passes: int) -> None:
        """Between two passes: let the others repeat one that this rank has completed."""
        while self.are_behind and self._regroup(num_passes, has_pass=False):
            try:
                take_part()
            except RuntimeError as error:
                self._forgive(error)
                self._wait_for_members()

    # --8<-- [end:repeat-the-pass]

    def _forgive(self, error: RuntimeError) -> None:
        """After an error in a pass: raise it again, unless it is that of a collective."""
        if not self.ranks.is_broken:
            raise error
        traceback.clear_frames(error.__traceback__)  # they hold the group, which ends now
        self.ranks.leave()

    def _regroup(self, num_passes: int, has_pass: bool) -> bool:
        """Go on with the ranks that are left. Returns whether one of them has a pass to repeat. Raises
        `RuntimeError` if the controller knows of no rank that has died."""
        self.ranks.leave()
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
                have_pass = self._take_over(members, num_passes, has_pass)
                got = torch.tensor([[experts.num_moved - num_moved, experts.num_reloaded - num_reloaded]])
                counts = self.ranks.all_gather(got).sum(0).tolist()
            except RuntimeError as error:  # another one may have died meanwhile, or one was slow
                self._forgive(error)
                if not self.are_behind and time.monotonic() > end:
                    raise
                attempt += 1
                continue
            if self.ranks.rank == 0:
                died = _listed([number for number in before if number not in members.ranks])
                print(
                    f"replica {died} died; its experts are with {_listed(members.ranks)}: {counts[0]} moved, "
                    f"{counts[1]} tensors read again, {time.monotonic() - start:.1f} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            return have_pass

    # --8<-- [start:regroup]
    def _take_over(self, members: Members, num_passes: int, has_pass: bool) -> bool:
        """Place the experts. `num_passes`: of this rank. `has_pass`: it has to repeat
        the last of them. Returns whether any rank has."""
        experts = self.experts
        own = [num_passes, has_pass, experts.num_passes, experts.num_moves, experts.is_whole]
        of_all = self.ranks.all_gather(torch.tensor([own])).T.tolist()
        passes, have_pass, experts_passes, moves, are_whole = of_all
        assert len(set(passes)) == 1, f"{members.ranks} are in different passes: {passes}"
        experts.num_passes = max(experts_passes)  # a pass that is repeated counts twice
        experts.keep(members.ranks, is_known=len(set(moves)) == 1 and all(are_whole))
        self.have_regrouped()
        return any(have_pass)

    # --8<-- [end:regroup]

    def _wait_for_members(self) -> None:
        with self._have_changed:
            if not self._have_changed.wait_for(lambda: self.are_behind, CALL_SECONDS):
                raise RuntimeError("a collective has failed, and no replica is known to have ended")

    def _meet(self, members: Members, attempt: int, end: float) -> None:
        """Join the group of the ranks that are left. A slow rank may miss the time limit of joining: then no
        rank gets behind the first collective, which needs all, and all of this list come to the next attempt.
        Each has a part of the store, in which no other group has met."""
        from torch.distributed import PrefixStore

        rank, size = members.ranks.index(self.own_number), len(members.ranks)
        store = PrefixStore(f"attempt {attempt}", open_store(members.path, size))
        store.set(f"rank {rank}", "")
        while not store.check([f"rank {peer}" for peer in range(size)]):
            if self.are_behind or time.monotonic() > end:
                raise RuntimeError(f"not all of the replicas {members.ranks} have come")
            time.sleep(POLL_SECONDS)
        self.ranks.rejoin(store, rank, size, CONNECT_SECONDS)


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
