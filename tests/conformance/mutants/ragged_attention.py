"""Planted bugs in plans for graphs of batches that need not have the same shape again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.shared.tools.conformance.oracles.replanned_attention import RaggedPlan, _replanned
from diptych.shared.types import ForwardBatch
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.stepped_attention import SteppedAttention


class Ragged(_replanned(SteppedAttention)):  # type: ignore[misc]
    """Attention that is right, with one decision more: which batch its buffers hold."""

    def plan_ragged(self, forward_batch: ForwardBatch) -> RaggedPlan:
        return RaggedPlan(self.read(forward_batch))

    def read(self, buffers: ForwardBatch) -> ForwardBatch:
        return buffers


ragged = mutant_of("attention")


@ragged
class KeepsTheLengthsOfItsPlan(Ragged):
    """Requests are as long as when the plan was made."""

    def read(self, buffers):
        return replace(buffers, seq_lens=buffers.seq_lens.clone())


@ragged
class BeginsWithTheFirstRow(Ragged):
    """Live rows are assumed to be the first ones."""

    def run(self, q: torch.Tensor, layer: Any, plan: Any, **kv: Any) -> torch.Tensor:
        if not isinstance(plan, RaggedPlan):
            return super().run(q, layer, plan, **kv)
        rows = plan.live()[1]
        first = int(rows[0]) if len(rows) else 0
        moved = super().run(q, layer, plan, **{**kv, "out": kv["out"].clone()})
        kv["out"][: len(rows)] = moved[first : first + len(rows)]
        return kv["out"]
