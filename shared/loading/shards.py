"""Tensor and expert parallelism: which part of each weight a rank has.

Attention and linear attention are divided by heads, an MLP and each expert by its intermediate size,
embedding and head by rows of the vocabulary. The rank's model is an ordinary model of smaller sizes
(`shard_config`). A weight whose shape is the same in both is on every rank as a whole. With `ep` parts of
ranks each part has some of the experts, and divides them among its ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.expert_balancer import ExpertMap
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.modeling.vocabulary import vocabulary_rows

REDUCED_BIASES = (".o_proj.bias", ".down_proj.bias")
"""Added before the sum over ranks, so one rank has them, and the others zeros."""
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
MERGED = (".linear_attn.in_proj_qkv.weight", ".linear_attn.conv1d.weight")
"""Rows for all heads of q, then of k, then of v. A rank has a part of each."""


_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")


def shard_config(
    config: ModelConfig, size: int, ep: int = 1, num_redundant: int = 0, dp: int = 1
) -> ModelConfig:
    """The model of one of `size` ranks: its heads and intermediate sizes. The vocabulary stays whole: the
    numbers of its rows differ by rank (`vocabulary_rows`). With `ep` parts a rank has 1/ep of the experts and
    of the redundant ones. `dp` replicas share the routed experts: all else is divided among the ranks of one.
    Raises `ValueError` for sizes that cannot be divided."""
    if size == 1:
        return config
    kv_heads, tp, moe, linear = config.num_kv_heads, size // dp, config.moe, config.linear_attention
    sizes = {"num_qo_heads": (config.num_qo_heads, tp), "intermediate_size": (config.intermediate_size, tp)}
    if moe is not None:
        sizes["moe.intermediate_size"] = moe.intermediate_size * ep, size
        sizes["moe.shared_intermediate_size"] = moe.shared_intermediate_size, tp
    if linear is not None:  # a key head and its value heads are on one rank
        sizes["linear_attention.num_k_heads"] = linear.num_k_heads, tp
    for name, (number, num) in sizes.items():
        if number % num != 0:
            ranks = f"tp={num}" if num == tp else f"dp * tp = {num}"
            raise ValueError(f"{ranks}: {name} ({number}) of {config.architecture} is not a multiple of it")
    if ep > 1:
        _check_experts(config, ep, num_redundant)
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size * ep // size,
            shared_intermediate_size=moe.shared_intermediate_size // tp,
            num_local_experts=(moe.num_experts + num_redundant) // ep if ep > 1 else None,
        )
    if linear is not None:
        linear = replace(linear, num_k_heads=linear.num_k_heads // tp, num_v_heads=linear.num_v_heads // tp)
    if kv_heads % tp != 0 and tp % kv_heads != 0:
        raise ValueError(f"tp={tp}: num_kv_heads is {kv_heads}; one must be a multiple of the other")
    if (tp - 1) * -(-config.vocab_size // tp) >= config.vocab_size:
        raise ValueError(f"tp={tp}: a vocabulary of {config.vocab_size} has no rows for the last rank")
    return replace(
        config,
        num_qo_heads=config.num_qo_heads // tp,
        num_kv_heads=max(kv_heads // tp, 1),
        intermediate_size=config.intermediate_size // tp,
        moe=moe,
        linear_attention=linear,
    )


def _check_experts(config: ModelConfig, ep: int, num_redundant: int) -> None:
    if config.moe is None:
        raise ValueError(f"ep={ep}: {config.architecture} has no experts")
    num_experts, num_physical = config.moe.num_experts, config.moe.num_experts + num_redundant
    if num_physical % ep != 0 or num_physical > num_experts * ep:
        raise ValueError(
            f"ep={ep}, ep_num_redundant_experts={num_redundant}: with the {num_experts} experts these are "
            f"{num_physical}; it must be a multiple of ep, and at most {num_experts * ep}"
        )


@dataclass(frozen=True)
class Shards:
    """The parts of one rank of a whole model."""

    config: ModelConfig  # of the whole model
    rank: int
    size: int
    ep: int = 1
    experts: ExpertMap | None = None  # with ep > 1: a row for each layer with experts, in their order
    dp: int = 1  # replicas that share the routed experts
    has_rest: bool = True  # False: routed experts alone

    def __post_init__(self) -> None:
        num_redundant = 0
        if self.experts is not None:
            num_redundant = self.experts.physical_to_logical.shape[1] - self.experts.num_replicas.shape[1]
        local_config = shard_config(self.config, self.size, self.ep, num_redundant, self.dp)
        object.__setattr__(self, "_whole", expected_shapes(self.config))
        object.__setattr__(self, "_local", expected_shapes(local_config))
        object.__setattr__(
            self, "_moe_rows", {layer: i for i, layer in enumerate(sorted(self.config.moe_layers))}
        )

    @property
    def first_layer(self) -> int:
        """The number of the rank's layer 0 in the whole model."""
        return 0

    def local_names(self, name: str) -> list[str]:
        """The rank's names for a whole model's weight: none for an expert that it does not have, and one for
        each replica."""
        match = _EXPERT.match(name)
        if match is None and not self.has_rest:
            return []
        if match is None or self.experts is None:
            return [name]
        row: int = self._moe_rows[int(match[1])]  # type: ignore[attr-defined]
        local = self.experts.physical_to_logical[row].chunk(self.ep)[self.rank * self.ep // self.size]
        return [
            f"{name[: match.start(2)]}{i}{name[match.end(2) :]}"
            for i, logical_id in enumerate(local.tolist())
            if logical_id == int(match[2])
        ]

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole weight."""
        return self.own(name, self.read(name, tensor))

    def read(self, name: str, tensor: Any) -> torch.Tensor:
        """The rank's part of a tensor or of a safetensors slice."""
        found = [tensor[index or (slice(None),)] for index in self.indices(name)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def own(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """What the rank loads for its part: zeros for a bias that another rank adds."""
        rank = self.rank % (self.size // self.dp)
        if _EXPERT.match(name):
            rank = self.rank % (self.size // self.ep)  # among the ranks that have parts of this expert
        is_added_elsewhere = rank > 0 and name.endswith(REDUCED_BIASES)
        return torch.zeros_like(part) if is_added_elsewhere else part

    # --8<-- [start:cut-q-k-v]
    def indices(self, name: str) -> list[tuple[slice, ...]]:
        """Where the rank's rows of a weight are: a place in each of q, k and v, or one."""
        linear = self.config.linear_attention
        if linear is None or not name.endswith(MERGED):
            return [self.index(name)]
        size, start = self.size // self.dp, 0
        found: list[tuple[slice, ...]] = []
        for num_rows in (linear.k_size, linear.k_size, linear.v_size):
            first = start + self.rank % size * num_rows // size
            found.append((slice(first, first + num_rows // size),))
            start += num_rows
        return found
        # --8<-- [end:cut-q-k-v]

    def index(self, name: str) -> tuple[slice, ...]:
        """Where the rank's part of a weight (by its canonical name) is; (): all of it is. Unknown names too,
        which loading refuses."""
        size = self.size // self.dp
        rank = self.rank % size
        local_name, match = name, _EXPERT.match(name)
        if match is not None:  # divided among the ranks of its part
            size = self.size // self.ep
            rank = self.rank % size
            local_name = f"{name[: match.start(2)]}0{name[match.end(2) :]}"
        whole: tuple[int, ...] = self._whole.get(name, ())  # type: ignore[attr-defined]
        local: tuple[int, ...] = self._local.get(local_name, ())  # type: ignore[attr-defined]
        if name in VOCABULARY and size > 1:
            return (vocabulary_rows(whole[0], rank, size),)
        # --8<-- [start:cut-a-weight]
        for dim, (num_whole, num_local) in enumerate(zip(whole, local)):
            if num_whole != num_local:
                # With fewer KV heads than ranks, neighbouring ranks have the same head.
                part = rank * (num_whole // num_local) // size
                return (slice(None),) * dim + (slice(part * num_local, (part + 1) * num_local),)
        return ()
        # --8<-- [end:cut-a-weight]
