"""Custom logit processors: Python functions of a request that change its logits. Slow: a step waits for the
tokens of the step before, and the functions run one after the other while the device waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from diptych.shared.to_device import to_device
from diptych.shared.types import Req, SamplingBatchInfo

LogitProcessor = Callable[[Sequence[Sequence[int]], torch.Tensor], torch.Tensor]
"""(output_ids, logits) -> logits: the output so far of n requests, and their logits [n, vocab_size] float32,
which may be changed in place. Called once a step for all requests that have the same function."""


@dataclass(frozen=True)
class ProcessorRows:
    """The rows of a batch that one function changes."""

    function: LogitProcessor
    rows: list[int]
    output_ids: list[list[int]]  # of each of these rows


def group_processors(entries: Iterable[tuple[Req, int, list[int]]]) -> tuple[ProcessorRows, ...]:
    """One entry for each function, of (request, row, output so far). Ended requests are left out."""
    found: dict[int, ProcessorRows] = {}
    for req, row, output_ids in entries:
        if req.logit_processor is not None and not req.finished:
            key = id(req.logit_processor)
            group = found.setdefault(key, ProcessorRows(req.logit_processor, [], []))
            group.rows.append(row)
            group.output_ids.append(list(output_ids))
    return tuple(found.values())


def apply_processors(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """[bs, vocab_size] float32: a copy, or the logits themselves where there is no processor. Raises
    `ValueError` for a function that returns anything but logits of the same shape."""
    if not info.processors:
        return logits
    logits = logits.clone()
    for group in info.processors:
        rows = to_device(group.rows, torch.int64, logits.device)
        given = logits[rows]
        found = group.function(group.output_ids, given)
        if not isinstance(found, torch.Tensor) or found.shape != given.shape:
            kind = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(
                f"a logit processor must return logits of shape {tuple(given.shape)}, got {kind}"
            )
        logits[rows] = found.to(logits)
    return logits
