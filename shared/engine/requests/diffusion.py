"""Checks of requests with block diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.requests.input_embeds import check_supported
from diptych.shared.loading.kv_sizing import check_mask_memory
from diptych.shared.types import DiffusionParams, SamplingParams

if TYPE_CHECKING:
    from diptych.shared.engine.build.assembly import Assembly

TAKEN = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "filter_order", "seed", "n", "stop",
    "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "skip_special_tokens", "reasoning_start",
    "reasoning_end",
)  # fmt: skip
"""Fields of SamplingParams that such a request may set: others ask for tokens in order."""


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
    check_mask_memory(assembly.memory, assembly.config, assembly.model_config)
    panel = assembly.selection["scheduler"]
    if panel not in ("reference", "optimized"):
        raise ValueError(f"diffusion requests need a scheduler of the engine, got scheduler={panel}")
    registry.load_part(f"{panel} block diffusion").serve_blocks(assembly.scheduler)


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
    check_supported("diffusion requests", config)
    if any(other is not None for other in others):
        raise ValueError("diffusion requests have a prompt of tokens, no embedding and no logit_processor")
    if "kv_cache" in config.use:
        raise ValueError(
            f"diffusion requests need masks, which kv_cache={config.use['kv_cache']} does not take"
        )
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
    plain = SamplingParams()
    names = [field.name for field in fields(sampling) if field.name not in TAKEN]
    changed = [name for name in names if getattr(sampling, name) != getattr(plain, name)]
    if changed:
        raise ValueError(
            f"diffusion requests do not support {', '.join(changed)}; the "
            "model's generation_config.json may have set it: generation_config=none"
        )
