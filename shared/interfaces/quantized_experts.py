"""Contract of routed experts whose weights are quantized."""

from __future__ import annotations

from abc import ABC

import torch
from torch import nn

from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.interfaces.moe import FusedExperts
from diptych.shared.types.quant_scheme import QuantScheme

SUFFIXES = {
    "weight": "",
    "weight_scale": "_scale",
    "weight_zero": "_zero",
    "weight_global": "_global",
    "input_scale": "_input",
}
"""A tensor of `QuantScheme.tensors` -> the end of the parameter's name."""


class QuantizedExperts(FusedExperts, ABC):
    """The experts of `FusedExperts` with x̂ and ŵ in place of x and w, as `QuantizedLinear` defines them. The
    input of w2 is quantized after the activation, each pair of token and expert by itself. So the result of
    a token depends on no other token.

    With `tp`, each rank has a part of the intermediate size of every expert, and amax of a pair is the
    largest of all ranks, which call the experts with the same arguments.

    A static scale is that of the expert; x has the larger of those of gate and up. vLLM and SGLang take the
    largest of all experts of a layer. Here a result does not depend on which experts a rank has.

    Parameters: `w13` and `w2` with `w13_scale` and `w2_scale`, and by scheme `w13_zero` and `w2_zero`, or
    `w13_global` and `w2_global`, or `w13_input` [experts, 2: gate, up] and `w2_input` [experts, 1]: the
    tensors of `QuantScheme.tensors` of each expert, one behind the other; and the biases. A rank's experts
    are moved by moving the rows of all parameters.
    """

    scheme: QuantScheme
    w13_scale: nn.Parameter
    w2_scale: nn.Parameter
    w13_zero: nn.Parameter | None
    w2_zero: nn.Parameter | None
    w13_global: nn.Parameter | None
    w2_global: nn.Parameter | None
    w13_input: nn.Parameter | None
    w2_input: nn.Parameter | None
    tp: Collectives | None = None
    """The ranks among which the intermediate size is divided; None: it is not."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        scheme: QuantScheme,
        bias: bool = False,
        swiglu_limit: float = 0.0,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, bias, swiglu_limit)
        self.scheme = scheme
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.w13_zero = self.w2_zero = self.w13_global = self.w2_global = None
        self.w13_input = self.w2_input = None
        for name, out, size in (
            ("w13", 2 * intermediate_size, hidden_size),
            ("w2", hidden_size, intermediate_size),
        ):
            for key, (shape, dtype) in scheme.tensors(out, size).items():
                if (name, key) == ("w13", "input_scale"):  # gate and up have their own
                    shape = (2,)
                tensor = torch.empty(num_experts, *shape, dtype=dtype)
                setattr(self, name + SUFFIXES[key], nn.Parameter(tensor, requires_grad=False))
        if bias:
            self.b13 = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size), requires_grad=False)
            self.b2 = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)

    def tensors_of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Weight and scale of "w13" or "w2", and its zero points or global scales."""
        weight, scale, zero, both, _ = (getattr(self, name + suffix) for suffix in SUFFIXES.values())
        return weight, scale, both if zero is None else zero

    def input_scales(self, name: str) -> torch.Tensor | None:
        """The static scale of the inputs of "w13" or "w2" of each expert, [experts]; None: there is none."""
        scales: torch.Tensor | None = getattr(self, name + SUFFIXES["input_scale"])
        return None if scales is None else scales.amax(1)

    def weight_views(self) -> dict[str, torch.Tensor]:
        """The tensors of each expert and matrix: "3.gate_proj.weight_scale" -> a view of a parameter."""
        views: dict[str, torch.Tensor] = {}
        parameters = {key: (f"w13{suffix}", f"w2{suffix}") for key, suffix in SUFFIXES.items()}
        for key, names in {**parameters, "bias": ("b13", "b2")}.items():
            w13, w2 = (getattr(self, name) for name in names)
            if w13 is None:
                continue
            for expert_id in range(w13.shape[0]):
                gate, up = w13[expert_id].chunk(2)
                views[f"{expert_id}.gate_proj.{key}"] = gate
                views[f"{expert_id}.up_proj.{key}"] = up
                views[f"{expert_id}.down_proj.{key}"] = w2[expert_id]
        return views

    @classmethod
    def like(cls, experts: FusedExperts, scheme: QuantScheme) -> QuantizedExperts:
        """What a model has in place of `experts`. Raises `ValueError` for another activation than SwiGLU."""
        if experts.hidden_act != "silu":
            raise ValueError(
                f"quantized experts with hidden_act={experts.hidden_act} are not supported; supported is silu"
            )
        num_experts, hidden_size, intermediate_size = experts.w2.shape
        has_bias = experts.b13 is not None
        return cls(num_experts, hidden_size, intermediate_size, scheme, has_bias, experts.swiglu_limit)
