"""Rows that requests give in place of embeddings, and positions of images: selects those of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from diptych.shared.to_device import copy_to_device
from diptych.shared.types import PromptEmbeds, Req


def embeds_of_step(
    extending: Sequence[Req], start_locs: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Token indices of a batch whose rows are given, [n] int64, and these rows [n, k * hidden_size]. Request
    i computes its tokens [len(prefix_indices), len(fill_ids)), which begin at start_locs[i] of the batch.
    None: there are no rows."""
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
    # --8<-- [end:embeds-of-step]
    if not any(map(len, rows)):
        return None, None
    width = max(each.shape[1] for each in rows)
    rows = [F.pad(each, (0, width - each.shape[1])) for each in rows]  # some requests add nothing
    return copy_to_device(torch.cat(indices), device), torch.cat(rows)


def rope_positions_of_step(
    reqs: Sequence[Req], seq_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """`ForwardBatch.rope_positions`. Request i computes its tokens [seq_lens[i] - extend_lens[i],
    seq_lens[i])."""
    if all(req.embeds is None or req.embeds.rope_positions is None for req in reqs):
        return None
    parts = [
        _rope_positions(req.embeds, seq_len - extend_len, seq_len)
        for req, seq_len, extend_len in zip(reqs, seq_lens, extend_lens)
    ]
    found = torch.cat(parts, dim=1)
    return copy_to_device(found if (found != found[0]).any() else found[0], device)


def _rope_positions(embeds: PromptEmbeds | None, start: int, end: int) -> torch.Tensor:
    """[3, end - start]"""
    plain = torch.arange(start, end).expand(3, -1)
    if embeds is None or embeds.rope_positions is None:
        return plain
    given = embeds.rope_positions[:, start:end]
    return torch.cat([given, plain[:, given.shape[1] :] + embeds.rope_delta], dim=1)
