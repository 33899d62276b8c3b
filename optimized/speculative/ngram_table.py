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

from diptych.optimized.kernels.draft.draft_ngram import LONGEST, enter_runs

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
        self.continuation_len = continuation_len
        self.namespaces = torch.zeros(num_entries, dtype=torch.int64, device=device)
        width = LONGEST.value + continuation_len
        self.tokens = torch.zeros(num_entries, width, dtype=torch.int32, device=device)
        self.stamps = torch.zeros(num_entries, dtype=torch.int64, device=device)
        self.num_stamps = 0

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens, self.namespaces, self.stamps

    def learn(
        self,
        tokens: torch.Tensor,
        namespaces: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        new_lens: torch.Tensor,
        most_new: int,
        multipliers: torch.Tensor,
    ) -> None:
        """As `enter_runs`; namespaces [num_rows]. Of several entries for one place the last stays, on any
        device. An entry whose continuation is not known in full does not replace one of the same run that
        has more."""
        self.num_stamps += enter_runs(
            tokens, namespaces, rows, ends, new_lens, most_new, multipliers, self.arrays, self.num_stamps + 1
        )
