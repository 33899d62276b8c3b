"""Planted bugs in experts with quantized weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.reference.quantized.quantized_moe import QuantizedExperts
from diptych.shared.modeling.dequantized_values import dequantize, dequantized_input
from tests.conformance.mutants.mutant import mutant_of


class SteppedExperts(QuantizedExperts):
    """One method for each decision."""

    def _linear(self, x, name, bias, expert_id):
        static = self.static_scale(name, expert_id) if self.scheme.inputs == "static" else None
        y = F.linear(self.input_of(x, name, static), self.weight_of(name, expert_id))
        return y if bias is None else y + bias[expert_id]

    def input_of(self, x: torch.Tensor, name: str, static: torch.Tensor | None) -> torch.Tensor:
        return dequantized_input(x, self.scheme, static, self.tp if name == "w2" else None)

    def static_scale(self, name: str, expert_id: int) -> torch.Tensor:
        return self.input_scales(name)[expert_id]

    def weight_of(self, name: str, expert_id: int) -> torch.Tensor:
        return dequantize(
            self.codes(getattr(self, name)[expert_id]),
            getattr(self, f"{name}_scale")[self.scale_expert(expert_id)],
            None if self.scheme.symmetric else getattr(self, f"{name}_zero")[expert_id],
            self.scheme,
        )

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def scale_expert(self, expert_id: int) -> int:
        return expert_id


@mutant_of("quantized_experts")
class ScalesOfTheFirstExpert(SteppedExperts):
    """All experts have the scales of the first."""

    def scale_expert(self, expert_id: int) -> int:
        return 0


@mutant_of("quantized_experts")
class UpIsGate(SteppedExperts):
    """The rows of up come first, as some kernels have them."""

    def weight_of(self, name: str, expert_id: int) -> torch.Tensor:
        weight = super().weight_of(name, expert_id)
        return torch.cat(weight.chunk(2)[::-1]) if name == "w13" else weight


@mutant_of("quantized_experts")
class OneScaleForAllTokens(SteppedExperts):
    """The scale of the inputs is that of the largest value of all tokens."""

    def input_of(self, x: torch.Tensor, name: str, static: torch.Tensor | None) -> torch.Tensor:
        if self.scheme.inputs != "token" or x.numel() == 0:
            return super().input_of(x, name, static)
        return super().input_of(x.reshape(1, -1), name, static).view(x.shape)


@mutant_of("quantized_experts")
class ScaleOfTheRanksPart(SteppedExperts):
    """A rank scales its part of an activation by the largest value of the part."""

    def input_of(self, x: torch.Tensor, name: str, static: torch.Tensor | None) -> torch.Tensor:
        return dequantized_input(x, self.scheme, static)


@mutant_of("quantized_experts")
class LargestStaticScale(SteppedExperts):
    """The static scale of inputs is the largest of all experts, as in other engines."""

    def static_scale(self, name: str, expert_id: int) -> torch.Tensor:
        return self.input_scales(name).nan_to_num().amax()


@mutant_of("quantized_experts")
class StaticScaleOfGate(SteppedExperts):
    """The static scale of up is not looked at."""

    def static_scale(self, name: str, expert_id: int) -> torch.Tensor:
        return getattr(self, f"{name}_input")[expert_id, 0]
