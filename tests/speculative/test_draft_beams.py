"""Batches of drafting steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.shared import registry
from diptych.shared.types import Beams, DraftBatch

CONTEXT_LEN = 32


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_positions_of_a_step_stop_at_the_end_of_the_context(panel: str, num_before: int) -> None:
    steps_class: Any = registry.load("drafter", f"diptych.{panel}.speculative.draft_beams:BeamSteps")
    lens = [4, CONTEXT_LEN - 2, CONTEXT_LEN - 1]
    seq_lens, rows = torch.tensor(lens), torch.arange(3)
    slots = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
    batch = DraftBatch([], torch.zeros(3), rows, seq_lens, tuple(lens), slots)
    steps = steps_class(batch, num_before, SimpleNamespace(req_to_token=slots), CONTEXT_LEN)
    zeros = torch.zeros(3, 2, dtype=torch.int64)
    for step in range(3):
        forward_batch = steps.next(Beams(zeros, zeros, zeros, zeros, zeros, zeros))
        expected = [min(n + num_before + step, CONTEXT_LEN - 1) for n in lens for _ in range(2)]
        assert forward_batch.positions.tolist() == expected
        assert forward_batch.seq_lens.tolist() == [n + num_before + 2 * (step + 1) for n in lens]
        assert forward_batch.seq_lens_cpu == tuple(forward_batch.seq_lens.tolist())
