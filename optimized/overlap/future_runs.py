"""Future runs: all tokens that a batch gives each request, before the CPU knows them.

A round of speculation gives a request one token or several, and the next round is launched before the CPU
knows how many. When it starts, it looks up here the request's length and the tokens that penalties count.
"""

from __future__ import annotations

import torch

from diptych.shared.types import SamplingBatchInfo


class FutureRuns:
    """Runs at the places of the FutureMap (optimized/overlap/future_map.py). Place 0 is never written: it is
    the empty run of a request without tokens in flight."""

    def __init__(self, num_places: int, max_len: int, device: torch.device) -> None:
        self.max_len = max_len
        self.lens = torch.zeros(num_places, dtype=torch.int64, device=device)
        self.token_ids = torch.full((num_places, max_len), -1, dtype=torch.int64, device=device)

    def store(self, first: int, token_ids: torch.Tensor, lens: torch.Tensor | int) -> None:
        """Store token_ids [bs, n]: each request's run, padded with -1."""
        bs, n = token_ids.shape
        self.lens[first : first + bs] = lens
        self.token_ids[first : first + bs, :n] = token_ids
        self.token_ids[first : first + bs, n:] = -1

    def look_up(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[bs] -> the runs [bs, max_len] and their lengths [bs]."""
        return self.token_ids[places], self.lens[places]


def count_runs(info: SamplingBatchInfo, token_ids: torch.Tensor) -> None:
    """Add runs to `output_counts`, which the CPU made without them."""
    if info.output_counts is not None:
        is_token = (token_ids >= 0).to(info.output_counts.dtype)
        info.output_counts.scatter_add_(1, token_ids.clamp(min=0), is_token)
