"""Planted bugs in where attention's output goes."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.modeling.forward import attention_output
from diptych.shared.types.attention import AttentionLayer
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.stepped_attention import SteppedAttention


class Output(SteppedAttention):
    """Attention with one decision more: how the output, a tensor of its own, gets to `out`."""

    def run(
        self, q: torch.Tensor, layer: AttentionLayer, plan: Any, *, out: torch.Tensor | None = None, **kv: Any
    ) -> torch.Tensor:
        output = super().run(q, layer, plan, **kv)
        return output if out is None else self.deliver(output, attention_output(q, layer, out))

    def deliver(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(output)


@mutant_of("attention")
class IgnoresOut(Output):
    """out is left as it was."""

    def deliver(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return output


@mutant_of("attention")
class ReturnsWhatItCopied(Output):
    """out is written, and another tensor returned."""

    def deliver(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(output)
        return output


@mutant_of("attention")
class AddsToOut(Output):
    """The output is added to what out holds."""

    def deliver(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.nan_to_num_().add_(output)


@mutant_of("attention")
class RemembersOut(Output):
    """A run without out writes to the out of the run before."""

    def run(
        self, q: torch.Tensor, layer: AttentionLayer, plan: Any, *, out: torch.Tensor | None = None, **kv: Any
    ) -> torch.Tensor:
        if out is None and (last := self.__dict__.get("last")) is not None and last.shape == q.shape:
            out = last
        self.last = out
        return super().run(q, layer, plan, out=out, **kv)


class Lenient(SteppedAttention):
    """`takes` lets some tensor pass for out that is none."""

    def run(
        self, q: torch.Tensor, layer: AttentionLayer, plan: Any, *, out: torch.Tensor | None = None, **kv: Any
    ) -> torch.Tensor:
        if out is None or not self.takes(q, out):
            return super().run(q, layer, plan, out=out, **kv)
        return out.copy_(super().run(q, layer, plan, **kv))

    def takes(self, q: torch.Tensor, out: torch.Tensor) -> bool:
        return False


@mutant_of("attention")
class RoundsToOut(Lenient):
    """out may have another dtype."""

    def takes(self, q: torch.Tensor, out: torch.Tensor) -> bool:
        return out.shape == q.shape and out.device == q.device and out.is_contiguous()


@mutant_of("attention")
class StridesOfOut(Lenient):
    """out need not be contiguous."""

    def takes(self, q: torch.Tensor, out: torch.Tensor) -> bool:
        return (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)


@mutant_of("attention")
class SaysItIsDeterministic(SteppedAttention):
    """Rows are said not to depend on each other, and sums are in the order that a GEMM of their shape has."""

    is_deterministic = True
