"""Planted bugs in collectives."""

from __future__ import annotations

from datetime import timedelta

import torch

from diptych.reference.parallel.collectives import Collectives
from tests.conformance.mutants.mutant import bugs_in, mutant_of

collectives = mutant_of("collectives")


@collectives
class OwnFirst(Collectives):
    """Each rank begins the sum with its own tensor: the bits differ by rank."""

    def _sum(self, parts):
        return super()._sum([parts[self.rank], *parts[: self.rank], *parts[self.rank + 1 :]])


@collectives
class SumsInPlace(Collectives):
    """The sum overwrites the argument."""

    def all_reduce(self, x):
        return x.copy_(super().all_reduce(x))


@collectives
class NormsOwnPart(Collectives):
    """The norm of this rank's part and the residual."""

    def all_reduce_add_and_norm(self, x, residual, norm):
        return norm.add_and_norm(x, residual)


@collectives
class BarrierDoesNotWait(Collectives):
    """A rank passes the barrier before the others call it."""

    def barrier(self):
        pass


@collectives
class Averages(Collectives):
    """A mean over ranks instead of a sum."""

    def _sum(self, parts):
        return (super()._sum(parts) / len(parts)).to(parts[0].dtype)


@collectives
class MinimumAsSum(Collectives):
    """Integers take the minimum over ranks."""

    def _sum(self, parts):
        if parts[0].dtype == torch.int64:
            return torch.stack(parts).amin(dim=0)
        return super()._sum(parts)


@collectives
class IntegersAsFloats(Collectives):
    """Integers are added in float32: large ones lose their last digits."""

    def _sum(self, parts):
        return super()._sum([part.float() for part in parts]).to(parts[0].dtype)


@collectives
class GathersOwnFirst(Collectives):
    """all_gather begins with the rank's own tensor."""

    def all_gather(self, x):
        return torch.roll(super().all_gather(x), -self.rank * x.shape[0], dims=0)


@collectives
class ScattersTheNextPart(Collectives):
    """Rank r gets part r + 1 of the sum."""

    def reduce_scatter(self, x):
        return torch.cat(super().all_reduce(x).chunk(self.size)[(self.rank + 1) % self.size :])[
            : x.shape[0] // self.size
        ]


@collectives
class EqualCounts(Collectives):
    """all_to_all returns the rows in the order of their number, not of their sender."""

    def all_to_all(self, x, send_counts, receive_counts):
        rows = super().all_to_all(x, send_counts, receive_counts)
        parts = sorted(rows.split(list(receive_counts)), key=len)
        return torch.cat(parts)


@collectives
class AlwaysFromRank0(Collectives):
    """broadcast ignores its source."""

    def broadcast(self, x, source=0):
        return super().broadcast(x, 0)


@collectives
class HoldsBackAMessage(Collectives):
    """Two messages arrive in the wrong order."""

    def receive(self, like, source):
        found = super().receive(like, source)
        earlier = vars(self).setdefault("earlier", found)
        return found if earlier is found else earlier


@collectives
class IsNeverBroken(Collectives):
    """A failed operation leaves is_broken False."""

    def _finish(self, operation, *args):
        work = operation(*args)
        if self.meanwhile is not None:
            self.meanwhile()
        work.wait()


@collectives
class WaitsFirst(Collectives):
    """The result is waited for before `meanwhile` is called."""

    def _finish(self, operation, *args):
        meanwhile, self.meanwhile = self.meanwhile, None
        super()._finish(operation, *args)
        if meanwhile is not None:
            meanwhile()


@collectives
class LogsWhatIsOver(Collectives):
    """An operation is logged after its end, so the one that waits is missing."""

    def broadcast(self, x, source=0):
        entries = list(self.log.entries)
        try:
            return super().broadcast(x, source)
        except RuntimeError:
            self.log.entries.clear()
            self.log.entries.extend(entries)
            raise


@collectives
class LogsEveryShape(Collectives):
    """The log of all_to_all has the number of rows, which may differ by rank."""

    def all_to_all(self, x, send_counts, receive_counts):
        rows = super().all_to_all(x, send_counts, receive_counts)
        self.log.entries[-1] = self.log.entries[-1]._replace(shape=tuple(x.shape))
        return rows


@collectives
class NumbersFromOne(Collectives):
    """The rank is counted from 1."""

    def __init__(self, store, rank, size, seconds, name="tp"):
        super().__init__(store, rank, size, seconds, name)
        self.rank += 1


@collectives
class KeepsItsNumber(Collectives):
    """A rank of a smaller group has the number of before."""

    def rejoin(self, store, rank, size, seconds):
        before = self.rank
        super().rejoin(store, rank, size, seconds)
        self.rank = before


@collectives
class HasTheLimitOfJoining(Collectives):
    """In a smaller group, operations have the time in which it was formed."""

    def rejoin(self, store, rank, size, seconds):
        self.limit = timedelta(seconds=seconds)
        super().rejoin(store, rank, size, seconds)


bug = bugs_in("collectives", "reference.parallel.collectives:Collectives", folder="reference.parallel.")
# fmt: off
bug("LatenessBreaksNothing", "After a timeout the group counts as whole.",
    ("collectives", "except RuntimeError:\n            self.is_broken = True",
     'except RuntimeError as error:\n            self.is_broken = "imed out" not in str(error)'))
