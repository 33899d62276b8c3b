"""A table on the device of what followed short runs of tokens in recent requests, for n-gram drafts.

An entry has a namespace, a run of 2, 4 or 8 tokens, and the tokens that followed it. Its place is a hash of
namespace and run. A new entry replaces the one in its place, so the table has a fixed size and forgets what
is old. Namespace and run are compared in full: a hash collision costs an entry, never a wrong match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from functools import lru_cache

import torch

RUN_LENS = (2, 4, 8)  # tokens of a run; each position has one entry of each length
LONGEST = RUN_LENS[-1]
NUM_ENTRIES = 1 << 19  # about 170,000 tokens; 80 bytes each with continuations of 8 tokens
MULTIPLIERS = (  # odd, for the hash: of the namespace and of each token of a run
    -7046029254386353131, -4417276706812531889, 1609587929392839161, -8796714831421723037,
    2870177450012600261, 6364136223846793005, -3372029247567499371, 1442695040888963407, 7809847782465536323,
)  # fmt: skip


@lru_cache(maxsize=4096)
def namespace_id(namespace: Hashable) -> int:
    """63 bits that are the same in every process, and never 0."""
    digest = hashlib.blake2b(repr(namespace).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 | 1


class NgramTable:
    """`continuation_len`: tokens kept behind a run."""

    def __init__(self, continuation_len: int, device: torch.device, num_entries: int = NUM_ENTRIES) -> None:
        self.device = device
        self.continuation_len = continuation_len
        self.num_entries = num_entries
        # Row num_entries takes what is not kept.
        self.namespaces = torch.zeros(num_entries + 1, dtype=torch.int64, device=device)
        width = LONGEST + continuation_len
        self.tokens = torch.zeros(num_entries + 1, width, dtype=torch.int32, device=device)
        self.stamps = torch.zeros(num_entries + 1, dtype=torch.int64, device=device)
        self.num_stamps = 0
        self._multipliers = torch.tensor(MULTIPLIERS, dtype=torch.int64, device=device)
        lens = torch.tensor(RUN_LENS, device=device)
        self._run_lens = lens
        self._is_in_run = torch.arange(LONGEST, device=device) >= LONGEST - lens[:, None]

    def learn(self, namespaces: torch.Tensor, windows: torch.Tensor) -> None:
        """namespaces [n] int64; windows [n, LONGEST + continuation_len]: the tokens around a position, -1
        where there is none or it is not known. Of several entries for one place the last stays. An entry
        whose continuation is not known in full does not replace one of the same run that has more."""
        runs = self._runs(windows[:, :LONGEST])
        following = windows[:, LONGEST:].to(torch.int32)
        places = self._places(namespaces, runs)
        is_known = (runs >= 0).sum(dim=2) == self._run_lens
        old = self.tokens[places]
        is_same = (old[..., :LONGEST] == runs).all(dim=2) & (self.namespaces[places] == namespaces[:, None])
        has_more = (old[..., LONGEST:] >= 0).sum(dim=2) > (following >= 0).sum(dim=1)[:, None]
        is_new = is_known & (following[:, :1] >= 0) & ~(is_same & has_more)
        # --8<-- [start:ngram-table-write]
        # Stamps grow with time. The entry with the largest one at a place is written,
        # so that the same tokens make the same table on a GPU too.
        stamps = torch.arange(places.numel(), device=self.device).view_as(places) + self.num_stamps + 1
        self.num_stamps += places.numel()
        places = places.masked_fill(~is_new, self.num_entries)
        self.stamps.scatter_reduce_(0, places.flatten(), stamps.flatten(), "amax")
        places = places.masked_fill(self.stamps[places] != stamps, self.num_entries)
        self.namespaces[places] = namespaces[:, None].expand_as(places)
        self.tokens[places] = torch.cat([runs, following[:, None].expand(-1, len(RUN_LENS), -1)], dim=2)
        # --8<-- [end:ngram-table-write]

    def look_up(self, namespaces: torch.Tensor, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """namespaces [bs]; newest [bs, LONGEST]: the last tokens, -1 where there is none -> what followed the
        longest run that they end with, [bs, continuation_len], -1 where it is not known; and the run's
        length, 0: no run is in the table."""
        runs = self._runs(newest)
        places = self._places(namespaces, runs)
        entries = self.tokens[places]
        is_found = (entries[..., :LONGEST] == runs).all(dim=2) & (
            self.namespaces[places] == namespaces[:, None]
        )
        match_lens, which = (is_found * self._run_lens).max(dim=1)
        following = entries[torch.arange(len(which), device=self.device), which, LONGEST:]
        return following.to(torch.int64), match_lens

    def _runs(self, newest: torch.Tensor) -> torch.Tensor:
        """[n, LONGEST] -> the last tokens by length, [n, lengths, LONGEST] int32, -1 before them."""
        return newest.to(torch.int32)[:, None].masked_fill(~self._is_in_run, -1)

    def _places(self, namespaces: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        mixed = (runs.to(torch.int64) * self._multipliers[1:]).sum(dim=2)
        mixed += (namespaces * self._multipliers[0])[:, None]
        mixed = (mixed ^ (mixed >> 29)) * self._multipliers[0]
        return (mixed ^ (mixed >> 32)) % self.num_entries
