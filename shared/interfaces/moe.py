"""Contracts of mixture-of-experts: routing, and the experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import nn

from diptych.shared.config import MoEConfig
from diptych.shared.config.model import HiddenAct


class TopKOutput(NamedTuple):
    topk_weights: torch.Tensor  # [num_tokens, k] float32
    topk_ids: torch.Tensor  # [num_tokens, k] int32; -1: padding


class TopK(ABC):
    """Routing: router logits to experts and weights.

    - softmax: softmax over all experts, the k largest;
    - grouped: softmax; a group's score is its largest; only the topk_group best groups take part;
    - biased-grouped: s = sigmoid(logits), c = s + correction_bias; a group's score is the sum of its two
      largest c; experts are chosen by c within the kept groups, *weighted by s*;
    - sigmoid: the k largest logits, weighted by their sigmoid.

    Ties: lowest id first. Weights descend by score (by c for biased-grouped). `norm_topk_prob` divides the
    weights by their sum. `routed_scaling_factor` multiplies them, here and nowhere else.
    """

    @abstractmethod
    def __init__(self, config: MoEConfig) -> None: ...

    @abstractmethod
    def __call__(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> TopKOutput:
        """router_logits [num_tokens, num_experts], any float dtype, computed in float32."""


class FusedExperts(nn.Module, ABC):
    """The routed experts of one layer.

    Parameters: `w13` [num_experts, 2 * intermediate, hidden] (gate rows first, then up), `w2`
    [num_experts, hidden, intermediate]; with `bias` b13 [num_experts, 2 * intermediate] and b2 [num_experts,
    hidden].
    y[t] = sum over j of topk_weights[t, j] * (w2[e] @ act + b2[e]), e = topk_ids[t, j], the weight applied in
    float32 before the sum. (gate, up) = w13[e] @ x[t] + b13[e], and act = silu(gate) * up, or with a
    `swiglu_limit` c: gate is at most c, up between -c and c, act = gate * sigmoid(1.702 gate) * (up + 1). Or
    with `hidden_act` "gelu_tanh" act = gelu(gate) * up, by GeluTanhAndMul's gelu, without a limit.
    An id of -1 contributes nothing; a token whose ids are all -1 gets zeros. Experts without tokens cost
    nothing that matters.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    b13: nn.Parameter | None
    b2: nn.Parameter | None
    swiglu_limit: float
    hidden_act: HiddenAct = "silu"

    @abstractmethod
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        swiglu_limit: float = 0.0,
        hidden_act: HiddenAct = "silu",
    ) -> None:
        super().__init__()
        if hidden_act != "silu" and swiglu_limit > 0:
            raise ValueError(
                f"hidden_act={hidden_act} with swiglu_limit={swiglu_limit:g}; a limit is for silu"
            )
        self.b13 = self.b2 = None
        self.swiglu_limit, self.hidden_act = swiglu_limit, hidden_act

    @abstractmethod
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        """x [num_tokens, hidden] -> the same shape and dtype. x is not modified."""


class ExpertsOnRanks(Protocol):
    """The routed experts of one layer, on several ranks (`diptych.shared.parallel.expert_parallel`)."""

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        """x, topk: tokens of this rank. experts: those that this rank has. Returns what all experts add; with
        tensor parallelism, where all ranks have the same tokens, this rank's summand of it."""


class MoE(nn.Module, ABC):
    """Router, routed experts and shared experts of one layer, built from a panel's TopK and FusedExperts.

    y = experts(x, topk(gate(x), correction_bias)) + shared_expert_gate(x).sigmoid() * shared_experts(x).
    Parameters: `gate.weight` [num_experts, hidden], with `bias` also `gate.bias`; those of `experts`; if
    biased-grouped, `correction_bias` [num_experts] float32; with shared experts
    `shared_experts.{gate,up,down}_proj.weight`, a SwiGLU of shared_intermediate_size; and if it is gated
    `shared_expert_gate.weight` [1, hidden].

    With `weight_on_input` the experts get x times the weight of a token's only expert, and their results
    count as they are.

    With expert parallelism `experts` are the config's num_local_experts, and `expert_parallel.run` stands for
    a call of `experts`: all ranks call `forward`.

    A class that cannot do what the config asks for (`bias`, `swiglu_limit`, `hidden_act`) raises `ValueError`
    when it is made.
    """

    topk: TopK
    experts: FusedExperts
    expert_parallel: ExpertsOnRanks | None = None

    @abstractmethod
    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden] -> the same shape and dtype: routed + shared experts."""
