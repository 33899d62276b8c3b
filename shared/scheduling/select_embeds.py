"""Rows that requests give in place of embeddings: selects the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.to_device import copy_to_device
from diptych.shared.types import Req


def embeds_of_step(
    extending: Sequence[Req], start_locs: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token indices of a batch whose rows are given, [n] int64, and these rows [n, hidden_size]. Request i
    computes its tokens [len(prefix_indices), len(fill_ids)), which begin at start_locs[i] of the batch. At
    least one request brings rows."""
    # --8<-- [start:embeds-of-step]
    indices, rows = [], []
    for req, start_loc in zip(extending, start_locs):
        if req.embeds is None:
            continue
        first, end = len(req.prefix_indices), len(req.fill_ids)
        positions = req.embeds.positions
        low, high = torch.searchsorted(positions, torch.tensor([first, end])).tolist()
        indices.append(positions[low:high] - first + start_loc)
        rows.append(copy_to_device(req.embeds.rows[low:high], device))
    return copy_to_device(torch.cat(indices), device), torch.cat(rows)
    # --8<-- [end:embeds-of-step]
