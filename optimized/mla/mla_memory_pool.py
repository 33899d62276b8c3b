"""The KV pool of multi-head latent attention: one row for each slot and layer.

Differs from reference: `move` does not wait for the GPU, and for a few slots is one kernel.
"""

from __future__ import annotations

import torch

from diptych.optimized.kernels.attention.move_kv import can_move, move_kv
from diptych.shared.modeling.kv_pool import MLARows


class MLATokenToKVPool(MLARows):
    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        slots = torch.stack([target_slots, source_slots])
        if slots.device != self._rows.device:
            slots = slots.pin_memory() if self._rows.is_cuda and slots.numel() else slots
            slots = slots.to(self._rows.device, non_blocking=self._rows.is_cuda)
        targets, sources = slots
        if self._rows.is_cuda and can_move(self._rows, len(targets)):
            move_kv(self._rows, self._rows, targets, sources)  # the same rows twice: V is in K
        else:
            self._rows[:, targets] = self._rows[:, sources]
