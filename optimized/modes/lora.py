"""LoRA adapters: y += scale * B (A x), by two kernels for all requests of a step.

Differs from reference: the weights of every slot are in one tensor for each layer, zero where an adapter has
a lower rank or does not change the layer, so a step does not depend on its adapters. `prepare` sorts the
step's tokens by slot into blocks at a fixed address, and CUDA graphs read them there. q, k and v are one
layer here, and so are gate and up. A x is computed on a second stream, beside the layer's own GEMM. Assumes
that kernels of other passes read a slot only before the pass that loads it: passes run in order on one
stream, and each layer joins the second one. Loses the fusion of norms, activations and residual sums with the
GEMMs of adapted layers, and two short kernels in each of them, also where no request of a step has an
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import triton
from torch import nn

from diptych.optimized.kernels.linear.lora_linear import BLOCK_M, MAX_SLICES, expand_add, shrink
from diptych.optimized.kernels.moe.moe_align import Blocks, align, num_ints
from diptych.shared.interfaces import CausalLM
from diptych.shared.interfaces import layers as layer_interface
from diptych.shared.interfaces import lora as interface
from diptych.shared.interfaces.lora import NO_ADAPTER, token_slots
from diptych.shared.loading.lora_adapter import adaptable_modules, check_modules
from diptych.shared.modeling.stream import PartialSums, Stream
from diptych.shared.to_device import vectors_to_device
from diptych.shared.types import ForwardBatch
from diptych.shared.types.lora import LoraAdapter


class _LoraLinear(nn.Module):
    """A linear layer, or several merged ones, with the adapters of a step's requests."""

    base: Any  # a linear layer of the panel, or one like it

    def __init__(self, base: nn.Module, pool: LoraPool, parts: dict[str, tuple[int, ...]]) -> None:
        """parts: the name of each linear layer -> (out_features, in_features)."""
        super().__init__()
        assert len(parts) <= MAX_SLICES
        self.base = base
        self.pool = pool
        self.parts = list(parts)
        self.sizes = [shape[0] for shape in parts.values()]
        num_slots, rank, in_features = pool.num_slots, pool.padded_rank, next(iter(parts.values()))[1]
        like = pool.like
        self.a = like.new_zeros(num_slots, len(parts), rank, in_features)
        self.b = like.new_zeros(num_slots, sum(self.sizes), rank)
        self.scales = like.new_zeros(num_slots, len(parts), dtype=torch.float32)

    # --8<-- [start:lora-linear]
    def forward(self, x: torch.Tensor, norm: layer_interface.RMSNorm | None = None) -> torch.Tensor:
        x = x if norm is None else norm(x)
        h = self._shrink(x)  # beside the next GEMM
        return self._add(self.base(x), h)

    def _shrink(self, x: torch.Tensor) -> torch.Tensor:
        with self.pool.second_stream():
            return shrink(x, self.a, self.pool.blocks)

    def _add(self, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        self.pool.join_second_stream()
        expand_add(y, h, self.b, self.scales, self.sizes, self.pool.blocks)
        return y

    # --8<-- [end:lora-linear]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = self._shrink(x)
        return self._add(self.base.add_to(residual, x), h)

    def add_later(self, residual: torch.Tensor, x: torch.Tensor) -> Stream:
        h = self._shrink(x)
        stream: Stream = self.base.add_later(residual, x)
        pending = stream.pending
        self._add(pending.parts[0] if isinstance(pending, PartialSums) else stream.residual, h)
        return stream

    def activated(self, act_fn: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        # not quantized, because the adapter multiplies it too
        y: torch.Tensor = act_fn(*gate_up.chunk(2, dim=-1))
        return y

    def split(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = self.base.split(y)
        return parts

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Load an adapter into a slot; parts that it lacks become zeros, because the slot may have had
        another adapter."""
        for buffer in (self.a, self.b, self.scales):
            buffer[slot].zero_()
        first = 0
        for i, (name, size) in enumerate(zip(self.parts, self.sizes)):
            weights = adapter.modules.get(name)
            if weights is not None:
                rank = weights.a.shape[0]
                self.a[slot, i, :rank].copy_(weights.a)
                self.b[slot, first : first + size, :rank].copy_(weights.b)
                self.scales[slot, i] = weights.scale
            first += size


class LoraPool(interface.LoraPool):
    models = "optimized"

    def __init__(
        self, model: CausalLM, num_slots: int, max_rank: int, num_rows: int, max_num_tokens: int
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.padded_rank = max(triton.next_power_of_2(max_rank), 16)  # the minimum of tensor cores
        self.like = next(model.parameters())
        self.shapes = adaptable_modules(model.config)
        device = self.like.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.slot_of_row = torch.full((num_rows + 1,), NO_ADAPTER, dtype=torch.int32, device=device)
        self.pending: list[tuple[int, LoraAdapter]] = []  # loaded by the next pass
        self.token_slots = torch.full((max_num_tokens, 1), NO_ADAPTER, dtype=torch.int32, device=device)
        num = num_ints(max_num_tokens, num_slots, BLOCK_M)
        self._blocks_memory = torch.zeros(num, dtype=torch.int32, device=device)
        self.blocks: Blocks = self._sorted()
        self.layers = self._wrap(model)

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        check_modules(adapter, self.shapes, self.max_rank)
        self.pending.append((slot, adapter))

    def assign(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        where, values = vectors_to_device([list(rows), list(slots)], self.slot_of_row.device)
        self.slot_of_row[where] = values.to(torch.int32)

    # --8<-- [start:lora-prepare]
    def prepare(self, batch: ForwardBatch) -> None:
        for slot, adapter in self.pending:
            for layer in self.layers:
                layer.load(slot, adapter)
        self.pending.clear()
        self.token_slots.fill_(NO_ADAPTER)
        self.token_slots[: batch.num_tokens, 0] = token_slots(self.slot_of_row, batch)
        self._sorted()

    # --8<-- [end:lora-prepare]

    def second_stream(self) -> AbstractContextManager[object]:
        """Within the block, work is queued on the second stream, after the present work of the current one.
        Until the streams are joined, the caller keeps the tensors that it reads."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def join_second_stream(self) -> None:
        """The current stream's next work waits for that of the second stream."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _sorted(self) -> Blocks:
        """Tokens sorted by slot, always in the same memory."""
        return align(self.token_slots, self.num_slots, BLOCK_M, out=self._blocks_memory)

    def _wrap(self, model: CausalLM) -> list[_LoraLinear]:
        merged = {
            f"{module_name.rpartition('.')[0]}.{part}": module_name
            for module_name, module in model.named_modules()
            if isinstance(module, layer_interface.MergedLinear)
            for part in cast("dict[str, int]", module.parts)
        }
        parts_of: dict[str, dict[str, tuple[int, ...]]] = {}  # module of the model -> its linear layers
        for name, shape in self.shapes.items():
            parts_of.setdefault(merged.get(name, name), {})[name] = shape
        layers = []
        for module_name, parts in parts_of.items():
            parent, _, attribute = module_name.rpartition(".")
            owner = model.get_submodule(parent)
            layers.append(_LoraLinear(getattr(owner, attribute), self, parts))
            setattr(owner, attribute, layers[-1])
        return layers

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for layer in self.layers for tensor in (layer.a, layer.b, layer.scales)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
