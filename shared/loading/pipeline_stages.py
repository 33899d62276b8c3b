"""Pipeline parallelism: the layers of each stage."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import Collectives
from diptych.shared.loading.shards import Shards

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDING, LAST = "model.embed_tokens.weight", ("model.norm.weight", "lm_head.weight")


def layers_of(num_layers: int, rank: int, size: int) -> range:
    """The layers of stage `rank`. Stages have equally many layers, or one more. Raises `ValueError` if one
    would have none."""
    if size > num_layers:
        raise ValueError(f"pp={size}: a model of {num_layers} layers has none for some ranks")
    return range(num_layers * rank // size, num_layers * (rank + 1) // size)


def own_layers(config: ModelConfig, engine_config: EngineConfig, ranks: Collectives | None) -> range:
    """The layers that this rank computes."""
    if engine_config.pp == 1:
        return range(config.num_hidden_layers)
    assert ranks is not None
    return layers_of(config.num_hidden_layers, ranks.rank // engine_config.tp, engine_config.pp)


def stage_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """The model of stage `rank`, whose layers are numbered from 0."""
    layers = layers_of(config.num_hidden_layers, rank, size)
    return replace(
        config,
        num_hidden_layers=len(layers),
        sliding_windows=config.sliding_windows[layers.start : layers.stop],
        attention_chunks=config.attention_chunks[layers.start : layers.stop],
        moe_layers=frozenset(layer - layers.start for layer in config.moe_layers if layer in layers),
        nope_layers=frozenset(layer - layers.start for layer in config.nope_layers if layer in layers),
    )


def remove_foreign(model: nn.Module, config: ModelConfig, rank: int, size: int) -> None:
    """Remove the modules that only other stages use: the embedding, except on the first stage and, if the
    head is tied to it, on the last; norm and head, except on the last."""
    parts: Any = model
    if rank > 0 and not (config.tie_word_embeddings and rank == size - 1):
        parts.model.embed_tokens = None
    if rank < size - 1:
        parts.model.norm = None
        parts.lm_head = None


@dataclass(frozen=True)
class Stage(Shards):
    """The parts of rank `rank` of the `size` ranks of a stage, with the names of its model."""

    stage: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = layers_of(self.config.num_hidden_layers, self.stage, self.num_stages)
        object.__setattr__(self, "_layers", layers)

    @property
    def first_layer(self) -> int:
        layers: range = self._layers  # type: ignore[attr-defined]
        return layers.start

    def local_names(self, name: str) -> list[str]:
        is_last = self.stage == self.num_stages - 1
        if name == EMBEDDING:
            return [name] * (self.stage == 0 or (is_last and self.config.tie_word_embeddings))
        if name in LAST:
            return [name] * is_last
        match = _LAYER.match(name)
        assert match is not None, name
        layers: range = self._layers  # type: ignore[attr-defined]
        layer = int(match[1])
        return [f"model.layers.{layer - layers.start}.{name[match.end() :]}"] if layer in layers else []
