"""Checks of requests with block diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.requests.input_embeds import check_supported
from diptych.shared.types import DiffusionParams, SamplingParams
from diptych.shared.types.sampling_params import MIN_TEMPERATURE

if TYPE_CHECKING:
    from diptych.shared.engine.build.assembly import Assembly

TAKEN = (
    "max_new_tokens", "temperature", "seed", "n", "stop", "stop_token_ids", "stop_regex", "ignore_eos",
    "no_stop_trim", "skip_special_tokens", "reasoning_start", "reasoning_end",
)  # fmt: skip
"""Fields of SamplingParams that such a request may set: its tokens are the likeliest ones."""


def accept_diffusion(
    params: DiffusionParams,
    sampling: SamplingParams,
    prompt_ids: Sequence[int],
    others: Sequence[object],
    assembly: Assembly,
) -> None:
    """`check_diffusion`, then let the engine's scheduler serve such requests."""
    if assembly.model_config.linear_attention is not None:  # a block is computed several times
        raise ValueError("diffusion requests do not work with linear attention")
    num_token_ids = assembly.parts.num_token_ids
    check_diffusion(params, sampling, prompt_ids, others, assembly.config, num_token_ids)
    registry.load_part("block_diffusion").serve_blocks(assembly.scheduler)


def check_diffusion(
    params: DiffusionParams,
    sampling: SamplingParams,
    prompt_ids: Sequence[int],
    others: Sequence[object],
    config: EngineConfig,
    num_token_ids: int,
) -> None:
    """Raise `ValueError` for a request that block diffusion does not serve. others: further
    fields of the request, all None."""
    check_supported("diffusion requests", config, is_of_reference=True)
    if any(other is not None for other in others):
        raise ValueError("diffusion requests have a prompt of tokens, no embedding and no logit_processor")
    if config.enable_mixed_chunk:
        raise ValueError("diffusion requests work without enable_mixed_chunk")
    if config.page_size % params.block_len:
        raise ValueError(
            f"page_size ({config.page_size}) must be a multiple of block_len ({params.block_len}): chunks of "
            "prompts and cached prefixes are whole pages, and a block must not be cut"
        )
    if params.mask_id >= num_token_ids:
        raise ValueError(f"mask_id ({params.mask_id}) must be below the {num_token_ids} token ids")
    if params.mask_id in prompt_ids:
        raise ValueError(f"the prompt has the mask token ({params.mask_id})")
    if sampling.temperature >= MIN_TEMPERATURE:
        raise ValueError(f"diffusion requests are greedy: temperature must be 0, got {sampling.temperature}")
    plain = SamplingParams(temperature=0.0)
    names = [field.name for field in fields(sampling) if field.name not in TAKEN]
    changed = [name for name in names if getattr(sampling, name) != getattr(plain, name)]
    if changed:
        raise ValueError(f"diffusion requests do not support {', '.join(changed)}")
