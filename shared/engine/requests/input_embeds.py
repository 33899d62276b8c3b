"""Prompts that give rows for layer 0 in place of token ids: their checks, and their keys in the prefix
cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.parallel import ONE_ENGINE
from diptych.shared.types import PromptEmbeds, SamplingParams

PLACEHOLDER = 0
"""The placeholder token id of a position whose row is given."""
SECRET = token_bytes(32)
WORKS_WITH: tuple[tuple[str, Any], ...] = (
    ("speculative", None),
    ("deterministic", False),
    ("hicache_tokens", None),
    *ONE_ENGINE,
    ("tp", 1),
    ("pp", 1),
    ("dp", 1),
)


@dataclass(frozen=True)
class EmbedsPrompt:
    """A prompt of rows only, [num_tokens, hidden_size] of any floating dtype."""

    rows: torch.Tensor


def check_supported(what: str, config: EngineConfig) -> None:
    """Raise `ValueError` if the engine takes plain token ids only."""
    chosen = config.use.items()
    own = sorted(name for name, use in chosen if registry.is_target(use) or registry.is_lab(use))
    if own:
        raise ValueError(f"{what} do not work with a component of your own: use has {', '.join(own)}")
    for name, only in WORKS_WITH:
        value = getattr(config, name)
        if value != only:
            raise ValueError(f"{what} work with {name}={only!r} alone; this engine has {name}={value!r}")


def embeds_prompt(
    rows: Any, params: SamplingParams, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
) -> tuple[list[int], PromptEmbeds]:
    """Token ids (placeholders) and rows of a prompt. Raises `ValueError` for anything but a finite tensor
    [num_tokens, hidden_size] of a floating dtype that fits the context, for parameters that need token ids,
    and if the engine takes token ids only."""
    check_supported("input_embeds", config)
    hidden_size = model_config.hidden_size
    if model_config.layer_input_size > 0:
        raise ValueError(
            f"input_embeds do not work with {model_config.architecture}, whose layers have embeddings of the "
            "token ids"
        )
    if params.logprob_start_len >= 0:
        raise ValueError(
            "input_embeds have no token ids, so no log-probabilities of the prompt: logprob_start_len must "
            f"be -1, got {params.logprob_start_len}"
        )
    context_len = config.context_len
    assert context_len is not None
    if not isinstance(rows, torch.Tensor):
        raise ValueError(
            f"input_embeds must be a tensor [num_tokens, hidden_size={hidden_size}], got "
            f"{type(rows).__name__}"
        )
    if rows.dim() != 2 or rows.shape[1] != hidden_size:
        raise ValueError(
            f"input_embeds must have the shape [num_tokens, hidden_size={hidden_size}], got "
            f"{list(rows.shape)}"
        )
    if not rows.is_floating_point():
        raise ValueError(f"input_embeds must be of a floating dtype, got {rows.dtype}")
    if len(rows) >= context_len:
        raise ValueError(
            f"input_embeds has {len(rows)} tokens; the context of {context_len} tokens allows "
            f"{context_len - 1} and one of output"
        )
    rows = rows.detach().to("cpu", dtype, copy=True)
    bad = (~rows.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(f"input_embeds[{row}, {column}] is {float(rows[row, column])} in {dtype}")
    positions = torch.arange(len(rows))
    return [PLACEHOLDER] * len(rows), PromptEmbeds(positions, rows, row_keys(rows), has_token_ids=False)


# --8<-- [start:row-keys]
def row_keys(rows: torch.Tensor) -> list[int]:
    """The prefix-cache key of each row [n, hidden_size], a digest."""
    return [digest_key(b"row", row) for row in rows.view(torch.uint8).numpy()]


def digest_key(kind: bytes, content: Any) -> int:
    """A key below 0, so that no token id has it, of 63 bits. The digest has a secret of
    this process: no client can compute two contents with one key."""
    digest = blake2b(kind + bytes(content), digest_size=8, key=SECRET).digest()
    return -1 - (int.from_bytes(digest, "little") >> 1)


# --8<-- [end:row-keys]


def rows_of_bytes(data: bytes, num_tokens: int) -> torch.Tensor:
    """Rows [num_tokens, hidden_size] float32 from the bytes that the engine's process receives. Raises
    `ValueError` for bytes that are not whole rows."""
    if len(data) % (4 * num_tokens):
        raise ValueError(f"{len(data)} bytes of input_embeds are not {num_tokens} rows of float32")
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(num_tokens, -1)


def as_prompts(prompts: Any, input_embeds: Any) -> Any:
    """The prompts of `input_embeds` of `LLM.generate`, one tensor or several. Raises `ValueError` if prompts
    are given too."""
    if prompts is not None or input_embeds is None:
        raise ValueError("give either prompts or input_embeds")
    if isinstance(input_embeds, Sequence) and not isinstance(input_embeds, str):
        return [EmbedsPrompt(rows) for rows in input_embeds]
    return EmbedsPrompt(input_embeds)
