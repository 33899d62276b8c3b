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
from typing import TYPE_CHECKING, NamedTuple

import torch

from diptych.shared.parallel.meeting import open_store
from diptych.shared.parallel.patience import POLL_SECONDS

if TYPE_CHECKING:
    from diptych.shared.parallel.in_step import DispatchInStep

NEWS_SECONDS = 10.0
"""For which a rank that misses another one waits for the controller's word."""
CONNECT_SECONDS = 2.0
"""Time limit of forming a group, whose ranks have all met. gloo takes five times as long for a rank that has died
since."""


class News(NamedTuple):
    """Who is left. Newer news have a larger number."""

    number: int
    ranks: list[int]  # by their numbers at the start
    path: str  # of the store in which they meet


class Survivors:
    """The group of one rank, as it becomes smaller. `hear` may be called by another thread."""

    def __init__(self, dispatch: DispatchInStep, seconds: float) -> None:
        """seconds: the time limit of a meeting; experts may be read meanwhile."""
        assert dispatch.experts is not None
        self.dispatch = dispatch
        self.experts = dispatch.experts
        self.ranks = dispatch.all_ranks
        self.seconds = seconds
        self.own_number = self.ranks.rank
        self.joined = 0  # the number of the news that this rank has followed
        self._news = News(0, list(range(self.ranks.size)), "")
        self._is_new = threading.Condition()

    @property
    def least_ranks(self) -> int:
        """That have room for all experts."""
        num_logical = self.experts.experts.num_replicas.shape[1]
        num_local = self.experts.experts.physical_to_logical.shape[1] // self.experts.ep
        return -(-num_logical // num_local)

    def hear(self, news: News) -> None:
        with self._is_new:
            self._news = max(news, self._news)
            self._is_new.notify_all()

    @property
    def are_behind(self) -> bool:
        """Whether there is news that this rank has not followed."""
        return self._news.number > self.joined

    def forgive(self, error: RuntimeError) -> None:
        """After an error in a pass: raise it again, unless it is that of a collective."""
        if not self.ranks.is_broken:
            raise error
        traceback.clear_frames(error.__traceback__)  # they hold the group, which ends now
        self.ranks.leave()

    # --8<-- [start:regroup]
    def regroup(self, num_passes: int, has_pass: bool) -> bool:
        """Go on with the ranks that are left. `num_passes`: of this rank. `has_pass`: it
        has to repeat the last of them. Returns whether any rank has. Raises
        `RuntimeError` if the controller knows of no dead rank."""
        self.ranks.leave()
        while True:
            news = self._newer()
            try:
                return self._join(news, num_passes, has_pass)
            except RuntimeError as error:  # another one may have died meanwhile
                self.forgive(error)

    def _join(self, news: News, num_passes: int, has_pass: bool) -> bool:
        start, experts, rank = time.monotonic(), self.experts, news.ranks.index(self.own_number)
        before = experts.num_moved, experts.num_reloaded
        self._meet(news, rank)
        own = [num_passes, has_pass, experts.num_passes, experts.num_moves, experts.is_whole]
        of_all = self.ranks.all_gather(torch.tensor([own]))
        passes, have_pass, steps, moves, are_whole = of_all.T.tolist()
        assert len(set(passes)) == 1, f"the ranks {news.ranks} are in different passes: {passes}"
        dead = [number for number in experts.numbers if number not in news.ranks]
        experts.num_passes = max(steps)  # a rank that repeats its pass counts it twice
        experts.keep(news.ranks, is_known=len(set(moves)) == 1 and all(are_whole))
        self.dispatch.have_regrouped()
        # --8<-- [end:regroup]
        moved = torch.tensor([[experts.num_moved - before[0], experts.num_reloaded - before[1]]])
        num_copied, num_read = self.ranks.all_gather(moved).sum(0).tolist()
        if rank == 0:
            print(
                f"replica {_listed(dead)} died; its experts are with {_listed(news.ranks)}, {num_copied} "
                f"moved and {num_read} tensors read again in {time.monotonic() - start:.1f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return any(have_pass)

    def wait_for_news(self) -> None:
        """Raises `RuntimeError` if the controller knows of no rank that has ended."""
        with self._is_new:
            if not self._is_new.wait_for(lambda: self.are_behind, NEWS_SECONDS):
                raise RuntimeError("a collective has failed, and no replica is known to have ended")

    def _newer(self) -> News:
        self.wait_for_news()
        self.joined, news = self._news.number, self._news
        return news

    def _meet(self, news: News, rank: int) -> None:
        """Join the group of the ranks that are left."""
        size, end = len(news.ranks), time.monotonic() + self.seconds
        store = open_store(news.path, size)
        store.set(f"rank {rank}", "")
        while not store.check([f"rank {peer}" for peer in range(size)]):
            if self.are_behind or time.monotonic() > end:
                raise RuntimeError(f"not all of the replicas {news.ranks} have come")
            time.sleep(POLL_SECONDS)
        self.ranks.rejoin(store, rank, size, CONNECT_SECONDS)


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
