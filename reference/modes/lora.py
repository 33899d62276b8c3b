"""LoRA adapters: y += scale * B (A x), request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from diptych.shared.interfaces import CausalLM
from diptych.shared.interfaces import lora as interface
from diptych.shared.interfaces.lora import NO_ADAPTER
from diptych.shared.loading.lora_adapter import adaptable_modules, check_modules
from diptych.shared.types import ForwardBatch
from diptych.shared.types.lora import LoraAdapter


class _LoraLinear(nn.Module):
    """A linear layer with the adapters of a step's requests."""

    def __init__(self, name: str, base: nn.Module, pool: LoraPool) -> None:
        super().__init__()
        self.name = name
        self.base = base
        self.pool = pool

    # --8<-- [start:lora-linear]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for tokens, adapter in self.pool.requests:
            weights = adapter.modules.get(self.name)
            if weights is not None:
                y[tokens] += weights.scale * (x[tokens] @ weights.a.T @ weights.b.T)
        return y

    # --8<-- [end:lora-linear]


class LoraPool(interface.LoraPool):
    def __init__(
        self, model: CausalLM, num_slots: int, max_rank: int, num_rows: int, max_num_tokens: int
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.like = next(model.parameters())
        self.shapes = adaptable_modules(model.config)
        self.adapters: dict[int, LoraAdapter] = {}  # by slot
        self.slot_of_row = [NO_ADAPTER] * (num_rows + 1)
        self.requests: list[tuple[slice, LoraAdapter]] = []  # in this step: a request's tokens, its adapter
        for name in self.shapes:
            parent, _, attribute = name.rpartition(".")
            module = model.get_submodule(parent)
            setattr(module, attribute, _LoraLinear(name, getattr(module, attribute), self))

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        check_modules(adapter, self.shapes, self.max_rank)
        modules = {
            name: replace(weights, a=weights.a.to(self.like), b=weights.b.to(self.like))
            for name, weights in adapter.modules.items()
        }
        self.adapters[slot] = replace(adapter, modules=modules)

    def assign(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        for row, slot in zip(rows, slots):
            self.slot_of_row[row] = slot

    # --8<-- [start:lora-prepare]
    def prepare(self, batch: ForwardBatch) -> None:
        ends = list(accumulate(batch.extend_seq_lens_cpu))
        starts = [0, *ends][:-1]
        slots = [self.slot_of_row[row] for row in batch.req_pool_indices.tolist()]
        self.requests = [
            (slice(start, end), self.adapters[slot])
            for start, end, slot in zip(starts, ends, slots)
            if slot != NO_ADAPTER
        ]

    # --8<-- [end:lora-prepare]

    @property
    def num_bytes(self) -> int:
        tensors = [
            tensor
            for adapter in self.adapters.values()
            for weights in adapter.modules.values()
            for tensor in (weights.a, weights.b)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
