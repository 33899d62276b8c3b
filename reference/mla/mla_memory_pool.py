"""The KV pool of multi-head latent attention: one row for each slot and layer."""

from __future__ import annotations

import torch

from diptych.shared.modeling.kv_pool import MLARows


class MLATokenToKVPool(MLARows):
    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        self._rows[:, target_slots] = self._rows[:, source_slots]
