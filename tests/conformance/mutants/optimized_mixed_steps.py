"""Planted bugs in mixed steps, with graphs simulated on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.types import ForwardBatch
from tests.conformance.mutants.mutant import mutant_of
from tests.model_runner.fake_graphs import FakeGraphsRunner


class WithOwnRows(FakeGraphsRunner):
    """Says otherwise whose the rows of a step are."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        for steps in self.steps.prefill[1:]:
            self.rows: Any = steps.rows
            self._right_load = self.rows.load
            self.rows.load = self.load

    def load(self, batch: ForwardBatch) -> None:
        self._right_load(batch)


mixed = mutant_of("model_runner")


@mixed
class LeavesOldRequests(WithOwnRows):
    """A request of an earlier step keeps its row if no other request has it."""

    def load(self, batch):
        before = self.rows._ints.clone()
        super().load(batch)
        self.rows._ints.copy_(torch.where(self.rows._ints == 0, before, self.rows._ints))


@mixed
class DecodesARowBehind(WithOwnRows):
    """Requests that decode stand a row behind their own."""

    def load(self, batch):
        super().load(batch)
        self.rows._decoding.copy_(self.rows._decoding.roll(1, dims=1))
