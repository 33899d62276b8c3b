"""Makes B continue with A's choices, so that a near tie does not end the comparison."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.diff.recorder import Key
from diptych.shared.tools.conformance.diff.side import Side
from diptych.shared.tools.conformance.oracles.router_ties import take_experts


class Teacher:
    """Steps A until it has the results that B needs, as A's batches may differ from B's."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a = a
        self.b = b

    def tokens(self, keys: list[Key | None], ids: torch.Tensor) -> torch.Tensor:
        """A's tokens in place of B's."""
        forced = ids.clone()
        for i, key in enumerate(keys):
            if key is None or not self.b.is_sampled_for_real(key):
                continue
            while key not in self.a.sampled and self.a.has_work():
                self.a.step()
            forced[i] = self.a.sampled.get(key, int(ids[i]))
        return forced

    def experts(
        self, op: str, keys: list[Key | None], router_logits: torch.Tensor, own: TopKOutput
    ) -> TopKOutput:
        """A's experts in place of B's, wherever A has chosen some."""
        config = self.a.llm.model_config.moe
        assert config is not None
        ids = torch.full((len(keys), config.num_experts_per_tok), -1)
        for i, key in enumerate(keys):
            while key is not None and not self.a.chosen_experts.is_decided(key) and self.a.has_work():
                self.a.step()
            chosen = self.a.chosen_experts.of(op, key)
            if chosen is not None:
                ids[i] = chosen
        return take_experts(config, router_logits, own, ids)
