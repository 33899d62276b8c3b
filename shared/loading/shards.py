"""Tensor parallelism: which part of each weight a rank has.

Attention is divided by heads, an MLP and each expert by its intermediate size, embedding and head by rows of
the vocabulary. The rank's model is an ordinary model of smaller sizes (`shard_config`). A weight whose shape
is the same in both is on every rank as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shared.config import ModelConfig
from shared.loading.weight_names import expected_shapes

REDUCED_BIASES = (".o_proj.bias", ".down_proj.bias")
"""Added before the sum over ranks, so one rank has them, and the others zeros."""
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The model of one of `size` ranks: its heads and intermediate sizes. The vocabulary stays whole: the
    numbers of its rows differ by rank (`vocabulary_rows`). Raises `ValueError` for sizes that cannot be
    divided."""
    if size == 1:
        return config
    kv_heads = config.num_kv_heads
    sizes = {"num_qo_heads": config.num_qo_heads, "intermediate_size": config.intermediate_size}
    moe = config.moe
    if moe is not None:
        sizes["moe.intermediate_size"] = moe.intermediate_size
        sizes["moe.shared_intermediate_size"] = moe.shared_intermediate_size
    for name, number in sizes.items():
        if number % size != 0:
            raise ValueError(f"tp={size}: {name} ({number}) of {config.architecture} is no multiple of it")
    if kv_heads % size != 0 and size % kv_heads != 0:
        raise ValueError(f"tp={size}: num_kv_heads is {kv_heads}; one must be a multiple of the other")
    if (size - 1) * -(-config.vocab_size // size) >= config.vocab_size:
        raise ValueError(f"tp={size}: a vocabulary of {config.vocab_size} has no rows for the last rank")
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size // size,
            shared_intermediate_size=moe.shared_intermediate_size // size,
        )
    return replace(
        config,
        num_qo_heads=config.num_qo_heads // size,
        num_kv_heads=max(kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
        moe=moe,
    )


def vocabulary_rows(vocab_size: int, rank: int, size: int) -> slice:
    """The rows of embedding and head that a rank has; the last ranks may have fewer, or none."""
    num_rows = -(-vocab_size // size)
    return slice(min(rank * num_rows, vocab_size), min((rank + 1) * num_rows, vocab_size))


@dataclass(frozen=True)
class Shards:
    """The parts of one rank of a whole model."""

    config: ModelConfig  # of the whole model
    rank: int
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_whole", expected_shapes(self.config))
        object.__setattr__(self, "_local", expected_shapes(shard_config(self.config, self.size)))

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole weight."""
        return self.own(name, tensor[self.index(name)])

    def own(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """What the rank loads for its part: zeros for a bias that another rank adds."""
        return torch.zeros_like(part) if self.rank > 0 and name.endswith(REDUCED_BIASES) else part

    def index(self, name: str) -> tuple[slice, ...]:
        """Where the rank's part of a weight (by its canonical name) is; (): all of it is. Unknown names too,
        which loading refuses."""
        whole: tuple[int, ...] = self._whole.get(name, ())  # type: ignore[attr-defined]
        local: tuple[int, ...] = self._local.get(name, ())  # type: ignore[attr-defined]
        if name in VOCABULARY:
            return (vocabulary_rows(whole[0], self.rank, self.size),)
        for dim, (num_whole, num_local) in enumerate(zip(whole, local)):
            if num_whole != num_local:
                # With fewer KV heads than ranks, neighbouring ranks have the same head.
                part = self.rank * (num_whole // num_local) // self.size
                return (slice(None),) * dim + (slice(part * num_local, (part + 1) * num_local),)
        return ()
