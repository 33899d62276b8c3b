"""Planted bugs in a host pool: layers, skipped tokens, order, types."""

from __future__ import annotations

import torch

import diptych.optimized.tiers.host_pool
import diptych.reference.tiers.host_pool
from tests.conformance.mutants.mutant import mutant_of


@mutant_of("host_pool")
class SkipsAtTheEnd(diptych.reference.tiers.host_pool.HostPool):
    """The last tokens of the pages are left out, not the first."""

    def load(self, pages, slots, num_skipped=0):
        all_slots = torch.cat([slots, slots[:1].expand(num_skipped)])
        rows = [r.clone() for r in self._rows_at(slots[:1])]
        super().load(pages, all_slots)
        if num_skipped:
            for target, before in zip(self._rows_at(slots[:1]), rows):
                target.copy_(before)

    def _rows_at(self, slots):
        layers = range(self.kv_pool.num_layers)
        return [self.kv_pool.k_buffer(layer)[int(slots[0])].view(torch.uint8) for layer in layers]


@mutant_of("host_pool")
class StoredTooLate(diptych.optimized.tiers.host_pool.HostPool):
    """What is stored is read in the pass after the next one, when the slots may hold other tokens."""

    def before_pass(self):
        late, self._late = getattr(self, "_late", []), self._pending
        self._pending = late
        super().before_pass()
        if any(copy.func == self._load for copy in self._late):
            self._pending, self._late = self._late, []
            super().before_pass()


@mutant_of("host_pool")
class LoadsFirst(diptych.optimized.tiers.host_pool.HostPool):
    """Loads are not queued behind stores."""

    def before_pass(self):
        self._pending.sort(key=lambda copy: copy.func != self._load)
        super().before_pass()


@mutant_of("host_pool")
class PagesInARow(diptych.optimized.tiers.host_pool.HostPool):
    """The pages of a load are taken for neighbours."""

    def load(self, pages, slots, num_skipped=0):
        super().load(range(pages[0], pages[0] + len(pages)), slots, num_skipped)


@mutant_of("host_pool")
class CopiesLater(diptych.optimized.tiers.host_pool.HostPool):
    """Copies do not start before the next pass."""

    def copies_so_far(self):
        return lambda: None


@mutant_of("host_pool")
class AlikeInWidth(diptych.reference.tiers.host_pool.HostPool):
    """V is as wide as K."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.buffers = [torch.zeros_like(self.buffers[0]) for _ in self.buffers]
