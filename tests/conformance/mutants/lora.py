"""Planted bugs in the LoRA pool: scales, slots, rows and ranks."""

from __future__ import annotations

from dataclasses import replace

import diptych.optimized.modes.lora
import diptych.reference.modes.lora
from tests.conformance.mutants.mutant import bugs_in, mutant_of


def with_scale(adapter, scale):
    modules = {name: replace(weights, scale=scale) for name, weights in adapter.modules.items()}
    return replace(adapter, modules=modules)


@mutant_of("lora")
class ScaleForgotten(diptych.reference.modes.lora.LoraPool):
    """B (A x) is added without the scale."""

    def load(self, slot, adapter):
        super().load(slot, with_scale(adapter, 1.0))


@mutant_of("lora")
class RowsInOrder(diptych.reference.modes.lora.LoraPool):
    """The slots are those of the first requests, not of their rows."""

    def prepare(self, batch):
        super().prepare(replace(batch, req_pool_indices=batch.req_pool_indices.flip(0)))


@mutant_of("lora")
class AdapterStays(diptych.reference.modes.lora.LoraPool):
    """A row that is assigned no adapter keeps the one of the request before."""

    def assign(self, rows, slots):
        known = [(row, slot) for row, slot in zip(rows, slots) if slot >= 0]
        super().assign(*zip(*known)) if known else None


@mutant_of("lora")
class OneTokenEach(diptych.reference.modes.lora.LoraPool):
    """Only the last token of a request gets its adapter."""

    def prepare(self, batch):
        super().prepare(batch)
        self.requests = [(slice(tokens.stop - 1, tokens.stop), a) for tokens, a in self.requests]


@mutant_of("lora")
class RankPaddingGarbage(diptych.optimized.modes.lora.LoraPool):
    """An adapter of a lower rank leaves the rest of the slot's last one."""

    def prepare(self, batch):
        buffers = [buffer for layer in self.layers for buffer in (layer.a, layer.b, layer.scales)]
        before = [buffer.clone() for buffer in buffers]
        is_reload, loads = bool(buffers[0].any()), bool(self.pending)
        super().prepare(batch)
        if is_reload and loads:
            for buffer, old in zip(buffers, before):
                buffer.copy_(buffer.where(buffer != 0, old))


@mutant_of("lora")
class LoadedAtOnce(diptych.optimized.modes.lora.LoraPool):
    """A load does not wait for the step under way."""

    def load(self, slot, adapter):
        super().load(slot, adapter)
        for layer in self.layers:
            layer.load(slot, adapter)


bug = bugs_in("lora", "reference.modes.lora:LoraPool", folder="reference.modes.")
# fmt: off
bug("LoadsAnything", "Modules, shapes and ranks are not checked.",
    ("lora", "check_modules(adapter, self.shapes, self.max_rank)", "pass"))
