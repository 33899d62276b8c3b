"""Embeddings and rewards: a vector for a prompt instead of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.parallel import ONE_ENGINE
from diptych.shared.engine.requests.output_collector import OutputCollector
from diptych.shared.loading.safetensors_file import read_checkpoint
from diptych.shared.types import SamplingParams

HEAD = "score.weight"
NO_TOKENS = SamplingParams(max_new_tokens=0)
"""The finish reason of a request that ends with its prompt."""


@dataclass(frozen=True)
class EmbedOutput:
    """The vector of one prompt."""

    embedding: list[float]  # of a reward model: its scores, one for each label
    num_prompt_tokens: int
    num_cached_tokens: int


def check_pooling(is_pooling: bool, config: EngineConfig, model_config: ModelConfig) -> None:
    """Raise `ValueError` if a request needs an embedding or an answer that the engine cannot give."""
    if not is_pooling:
        if model_config.num_labels:
            raise ValueError("this is a reward model: it gives scores and no tokens")
        return
    for name, only in (("speculative", None), ("pp", 1), ("dp_attention", False), *ONE_ENGINE):
        if getattr(config, name) != only:
            raise ValueError(f"embeddings do not work with {name}={getattr(config, name)}")


# --8<-- [start:finish-embedding]
def finish_embedding(
    vector: Sequence[float], dimensions: int | None = None, is_normalized: bool = True
) -> list[float]:
    """Keep the first `dimensions` numbers (default: all) and divide them by their L2
    norm."""
    cut = list(vector[:dimensions])
    length = math.sqrt(sum(x * x for x in cut)) if is_normalized else 1.0
    return [x / max(length, 1e-12) for x in cut]


# --8<-- [end:finish-embedding]


def embed_outputs(
    collectors: Sequence[OutputCollector], dimensions: int | None, num_labels: int
) -> list[EmbedOutput]:
    """The outputs of requests that have ended. Raises `RuntimeError` for one without an embedding."""
    outputs = []
    for collector in collectors:
        if collector.embedding is None:
            raise RuntimeError(f"{collector.rid}: {collector.finish_reason}")
        vector = finish_embedding(collector.embedding, dimensions, is_normalized=not num_labels)
        outputs.append(EmbedOutput(vector, collector.num_prompt_tokens, collector.num_cached_tokens))
    return outputs


def check_dimensions(dimensions: int | None, model_config_size: int) -> None:
    """Raise `ValueError` unless it is None or 1 .. the hidden size."""
    is_int = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (is_int and 1 <= dimensions <= model_config_size):
        raise ValueError(f"dimensions must be an integer in [1, {model_config_size}], got {dimensions!r}")


def read_reward_head(folder: Path, config: ModelConfig, is_dummy: bool) -> torch.Tensor | None:
    """The head of a reward model, [num_labels, hidden_size] float32 on the CPU; None for other models. Raises
    `ValueError` for a checkpoint without it, or with another shape."""
    from safetensors import safe_open

    if not config.num_labels:
        return None
    shape = config.num_labels, config.hidden_size
    if is_dummy:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * config.hidden_size**-0.5
    info = read_checkpoint(folder).get(HEAD)
    if info is None or info.shape != shape:
        found = "missing" if info is None else f"of shape {list(info.shape)}"
        raise ValueError(f"{folder}: {HEAD} is {found}; a reward model has it, of shape {list(shape)}")
    with safe_open(info.path, framework="pt", device="cpu") as file:
        weight: torch.Tensor = file.get_tensor(HEAD)
    return weight.float()
