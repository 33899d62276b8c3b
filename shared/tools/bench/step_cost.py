"""Counts the bytes and FLOPs that one step needs at least: weights, live KV, multiplications."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import StatePool
from diptych.shared.loading.quantize import num_weight_bytes, scheme_of_weight
from diptych.shared.loading.shards import shard_config
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.modeling.vocabulary import vocabulary_rows

GROUPS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "q_a_proj": "qkv_proj",  # latent attention
    "kv_a_proj_with_mqa": "qkv_proj",
    "q_b_proj": "q_b_proj",
    "kv_b_proj": "kv_b_proj",
    "o_proj": "o_proj",
    "in_proj_qkv": "in_proj",  # linear attention
    "in_proj_z": "in_proj",
    "in_proj_b": "in_proj",
    "in_proj_a": "in_proj",
    **dict.fromkeys(("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"), "in_proj"),
    "out_proj": "out_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "gate": "router",
    "lm_head": "lm_head",
    "embed_tokens": "lm_head",  # only a tied embedding reaches this line
}
"""module of a weight -> the phase that reads it; all others are norms"""
OF_REQUESTS = ("attention", "linear attention")
"""Phases that read what requests have, and no weight."""


class Phase(NamedTuple):
    """The work of one kind in a step, over all layers."""

    name: str
    num_bytes: float
    flops: float


@dataclass(frozen=True)
class Ceilings:
    """The device's measured ceilings: bytes/s of its memory, FLOP/s of its GEMMs."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True)
class StepCost:
    """The least bytes and FLOPs of a step. Bytes: every weight once (without an untied embedding, and only
    the experts that are hit), the KV of all visible tokens read once, and that of new tokens written, the
    states of linear attention read and written once. FLOPs: two for each multiplication of GEMMs and
    attention, and of the recurrence token by token; one if both operands have 8 bits, which tensor cores
    multiply at twice the rate. Activations, logits and norms are not counted."""

    phases: tuple[Phase, ...]

    @property
    def weight_bytes(self) -> float:
        return sum(phase.num_bytes for phase in self.phases if phase.name not in OF_REQUESTS)

    @property
    def kv_bytes(self) -> float:
        """With the states of linear attention."""
        return sum(phase.num_bytes for phase in self.phases if phase.name in OF_REQUESTS)

    @property
    def num_bytes(self) -> float:
        return sum(phase.num_bytes for phase in self.phases)

    @property
    def flops(self) -> float:
        return sum(phase.flops for phase in self.phases)

    def bound(self, ceilings: Ceilings) -> float:
        """Roofline bound in seconds: the larger of the times for bytes and for FLOPs."""
        return max(self.num_bytes / ceilings.bandwidth, self.flops / ceilings.matrix_rate)

    def roofline(self, ceilings: Ceilings) -> float:
        """The sum of the phases' bounds in seconds, as each phase must end before the next starts."""
        return sum(
            max(phase.num_bytes / ceilings.bandwidth, phase.flops / ceilings.matrix_rate)
            for phase in self.phases
        )


def is_one_engine(config: EngineConfig) -> bool:
    """Whether a step is one call of a model runner, on each rank. Others have no roofline bound here."""
    return config.pp == config.dp == 1 and not (config.dp_attention or config.disaggregation)


def of_rank(
    config: EngineConfig, model_config: ModelConfig, ceilings: Ceilings
) -> tuple[ModelConfig, Ceilings]:
    """The model of one of `config.tp` ranks, and what the rank has of the device: on a CPU all ranks share
    it. The rank is the first, which has the most rows of the vocabulary."""
    if config.tp == 1:
        return model_config, ceilings
    local = shard_config(model_config, config.tp, config.ep, config.ep_num_redundant_experts)
    rows = vocabulary_rows(model_config.vocab_size, 0, config.tp)
    moe = local.moe
    if moe is not None and config.ep > 1:  # replicas divide the tokens of an expert
        moe = replace(moe, num_local_experts=max(moe.num_experts // config.ep, 1))
    if config.device == "cpu":
        ceilings = Ceilings(ceilings.bandwidth / config.tp, ceilings.matrix_rate / config.tp)
    return replace(local, vocab_size=rows.stop - rows.start, moe=moe), ceilings


def step_cost(
    config: ModelConfig,
    seq_lens: Sequence[int],
    extend_seq_lens: Sequence[int],
    dtype: torch.dtype,
    num_experts_hit: float | None = None,
    kv_dtype: torch.dtype | None = None,
) -> StepCost:
    """The cost of a step. Request i has seq_lens[i] tokens after the step, of which extend_seq_lens[i] are
    computed in it. `num_experts_hit`: distinct experts used in a layer, on average over the layers; default:
    the expected number for uniform routing. `kv_dtype`: of the KV pool, if it is not `dtype`."""
    num_tokens, num_heads = sum(extend_seq_lens), len(seq_lens)
    sums: dict[str, list[float]] = {}

    def add(phase: str, num_bytes: float, flops: float) -> None:
        entry = sums.setdefault(phase, [0.0, 0.0])
        entry[0] += num_bytes
        entry[1] += flops

    hit = expert_share = 0.0
    if config.moe is not None:
        hit = num_experts_hit if num_experts_hit is not None else expected_experts_hit(config, num_tokens)
        hit /= config.moe.num_experts
        expert_share = config.moe.num_experts_per_tok / config.moe.num_experts
    for name, shape in expected_shapes(config).items():
        module = name.split(".")[-2]
        is_read_whole = config.tie_word_embeddings and module != "embed_tokens_per_layer"
        if module.startswith("embed_tokens") and not is_read_whole:
            continue
        phase = GROUPS.get(module, "norms")
        numel = math.prod(shape)
        read, used = 1.0, float(num_heads if phase == "lm_head" else num_tokens)
        if ".experts." in name:
            phase, read, used = f"experts.{phase}", hit, num_tokens * expert_share
        scheme = scheme_of_weight(config.quantization, name, shape)
        rate = 2 if scheme is not None and scheme.inputs != "none" else 1
        num_bytes = num_weight_bytes({name: shape}, config.quantization, dtype)
        add(phase, read * num_bytes, 2 * numel * used * (len(shape) == 2) / rate)
    for layer_id in range(config.num_hidden_layers):
        if (linear := config.linear_attention) is not None and layer_id in config.linear_layers:
            states = 2 * len(seq_lens) * StatePool.bytes_per_row(1, linear, dtype)
            add("linear attention", states, 6 * num_tokens * linear.v_size * linear.k_head_dim)
            continue
        layer, window = config.of_layer(layer_id), config.sliding_window(layer_id)
        for seq_len, extend_len in zip(seq_lens, extend_seq_lens):
            num_seen = seq_len if window < 0 else min(seq_len, window + extend_len)
            kv = layer.kv_size * num_seen * (kv_dtype or dtype).itemsize
            pairs = _num_pairs(seq_len, extend_len, window)
            add("attention", kv, 2 * layer.num_qo_heads * (layer.head_dim + layer.v_head_dim) * pairs)
    return StepCost(tuple(Phase(name, *entry) for name, entry in sums.items()))


def expected_experts_hit(config: ModelConfig, num_tokens: int) -> float:
    """The expected number of distinct experts that `num_tokens` tokens use, if each chooses at random."""
    assert config.moe is not None
    num_experts, per_token = config.moe.num_experts, config.moe.num_experts_per_tok
    return num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)


def _num_pairs(seq_len: int, extend_len: int, window: int) -> int:
    """The number of (token, visible token) pairs: the token at position p sees p + 1 tokens, or at most its
    window and itself."""
    first = seq_len - extend_len + 1  # tokens that the first new token sees in a causal layer

    def triangle(n: int) -> int:
        return n * (n + 1) // 2

    if window < 0 or seq_len <= window + 1:
        return triangle(seq_len) - triangle(first - 1)
    whole = window + 1
    if first >= whole:
        return extend_len * whole
    return triangle(whole) - triangle(first - 1) + (seq_len - whole) * whole
