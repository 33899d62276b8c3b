"""What a model needs of a GPU: weights, KV slots, requests, and the roofline bound of a decode step.

The bound is that of `diptych bench step` (step_cost.py). The pool is planned as the engine plans it
(shared/loading/kv_sizing.py), with an estimate of what CUDA and the loaded weights take beside their bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.engine.build.features.beside_model import num_kept_states
from diptych.shared.loading.kv_sizing import GIB, kv_bytes_per_token, num_rows, pool_budget, reserve_for_steps
from diptych.shared.loading.quantize import num_weight_bytes
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.tools.bench.step_cost import Ceilings, of_rank, step_cost

OVERHEAD = int(0.8 * GIB)
"""The CUDA context, and what loading leaves behind: 0.7 to 0.9 GiB in recorded runs on an H200."""
MEMORY_SHARE, BANDWIDTH_SHARE, MATRIX_SHARE = 0.99, 0.90, 0.80
"""What torch reports, and what the ceilings reach on an H200, as shares of its data sheet (GiB for GB). Other
cards are assumed to be alike."""


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet. matrix_rate: dense bfloat16 with float32 sums."""

    name: str
    gigabytes: float
    bandwidth: float  # bytes/s
    matrix_rate: float  # FLOP/s

    @property
    def memory(self) -> int:
        """Bytes that torch can use."""
        return int(self.gigabytes * MEMORY_SHARE * GIB)

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(self.bandwidth * BANDWIDTH_SHARE, self.matrix_rate * MATRIX_SHARE)


CARDS = {
    card.name: card
    for card in (
        Card("H100", 80, 3.35e12, 989e12),
        Card("H200", 141, 4.8e12, 989e12),
        Card("B200", 180, 8.0e12, 2250e12),
        Card("A100-80GB", 80, 2.039e12, 312e12),
        Card("RTX-4090", 24, 1.008e12, 165e12),
    )
}


@dataclass(frozen=True)
class Formula:
    """A model in a precision, as the numbers from which all others follow. They come from `step_cost`, which
    is linear in the experts hit and, within a window, in the context. The calculator of the site has the same
    formulas (docs/javascripts/calculator.js)."""

    weights: int  # bytes in memory
    reserved: int  # bytes for steps, with the engine's default flags
    pool_bytes_per_token: int
    max_slots: int  # that the engine's running requests can fill
    read_bytes: float  # of weights in a step, without experts
    expert_bytes: float  # of one expert, over all layers
    num_experts: int  # 0: none
    experts_per_token: int
    request_flops: float  # of a new token, without attention
    kv_read_bytes: float  # of one visible token in one layer
    state_bytes: float  # of a request in a step: states of linear attention, read and written
    pair_flops: float  # of one visible token in one layer
    layers: tuple[tuple[int, int], ...]  # (tokens that a layer sees at most, or -1 for all; number of layers)

    def num_slots(self, memory: int, fraction: float) -> int:
        """Slots of the KV pool on a GPU with so many bytes."""
        free = memory - OVERHEAD - self.weights
        budget = max(pool_budget(fraction, free, memory, self.reserved), 0)
        return min(budget // self.pool_bytes_per_token, self.max_slots)

    def step(self, batch_size: int, context_len: int) -> tuple[float, float]:
        """Bytes and FLOPs of a decode step."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        hit = self.num_experts * (1 - (1 - share) ** batch_size)
        seen = sum(
            count * (context_len if most < 0 else min(context_len, most)) for most, count in self.layers
        )
        num_bytes = self.read_bytes + hit * self.expert_bytes
        num_bytes += batch_size * (seen * self.kv_read_bytes + self.state_bytes)
        return num_bytes, batch_size * (self.request_flops + seen * self.pair_flops)

    def bound(self, batch_size: int, context_len: int, ceilings: Ceilings) -> float:
        """Seconds of a decode step at least."""
        num_bytes, flops = self.step(batch_size, context_len)
        return max(num_bytes / ceilings.bandwidth, flops / ceilings.matrix_rate)


def formula_of(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Formula:
    """For the first of `config.tp` ranks. model: with its quantization."""
    if model.kv_heads:
        raise ValueError(
            f"bench size takes models with heads of one size; those of {model.architecture} differ"
        )
    reserved = sum(reserve_for_steps(config, model, dtype).values())
    local, _ = of_rank(config, model, Ceilings(1, 1))
    shapes = expected_shapes(local)

    def at(num_experts_hit: float) -> Any:
        return step_cost(local, [1], [1], dtype, num_experts_hit=num_experts_hit, kv_dtype=kv_dtype)

    num_layers, cost = local.num_kv_layers, at(0)
    moe, linear = local.moe, local.linear_attention
    pair = next(phase.flops for phase in cost.phases if phase.name == "attention")
    states = sum(phase.num_bytes for phase in cost.phases if phase.name == "linear attention")
    if linear is not None:  # a state for each row, and those of the prefix cache
        reserved += (num_rows(config) + 1 + num_kept_states(config)) * int(states) // 2
    with_kv = [layer_id for layer_id in range(local.num_hidden_layers) if layer_id not in local.linear_layers]
    windows = [local.sliding_window(layer_id) for layer_id in with_kv]
    most = [window if window < 0 else window + 1 for window in windows]
    return Formula(
        weights=num_weight_bytes(shapes, local.quantization, dtype),
        reserved=reserved,
        pool_bytes_per_token=kv_bytes_per_token(local, kv_dtype),
        max_slots=config.max_running_requests * model.context_len,
        read_bytes=cost.weight_bytes,
        expert_bytes=at(1).weight_bytes - cost.weight_bytes,
        num_experts=0 if moe is None else moe.num_experts,
        experts_per_token=0 if moe is None else moe.num_experts_per_tok,
        request_flops=cost.flops - pair,
        kv_read_bytes=(cost.kv_bytes - states) / num_layers,
        state_bytes=states,
        pair_flops=pair / num_layers,
        layers=tuple((number, most.count(number)) for number in sorted(set(most))),
    )


@dataclass(frozen=True)
class Size:
    """An engine on one GPU (with tensor parallelism: on each). Bytes and seconds."""

    card: str
    weights: int
    kv_bytes_per_token: int
    num_slots: int
    context_len: int
    batch_size: int
    max_requests: int  # of context_len tokens, that the pool holds
    step_bytes: float
    step_flops: float
    step_bound: float

    @property
    def tokens_per_second(self) -> float:
        """At most, of all requests of a batch together."""
        return self.batch_size / self.step_bound

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def size_of(
    formula: Formula, card: Card, context_len: int, batch_size: int | None, config: EngineConfig
) -> Size:
    """batch_size None: as many requests as fit, at most max_running_requests. Raises `ValueError` if nothing
    fits."""
    num_slots = formula.num_slots(card.memory, config.mem_fraction_static)
    fitting = num_slots // context_len
    batch = min(fitting, config.max_running_requests) if batch_size is None else batch_size
    if num_slots < 1 or batch < 1:
        raise ValueError(
            f"no request of {context_len} tokens fits: the weights take {formula.weights / GIB:.1f} of "
            f"{card.memory / GIB:.1f} GiB, and {num_slots:,} slots are left. Take a larger card, --tp, "
            "--quantization fp8 or --kv-cache-dtype fp8_e4m3"
        )
    num_bytes, flops = formula.step(batch, context_len)
    return Size(
        card.name, formula.weights, formula.pool_bytes_per_token, num_slots, context_len, batch, fitting,
        num_bytes, flops, formula.bound(batch, context_len, card.ceilings),
    )  # fmt: skip
