"""A draft model beside its target: with its own weights, and those that they share."""

from __future__ import annotations

import torch

from shared.config import DraftConfig, EngineConfig, draft_shape
from shared.config.speculation import check_windows
from shared.interfaces import DrafterParts, DraftModel
from shared.loading.draft_weights import dummy_draft_weights, iterate_draft_weights, refuse_language_model
from shared.loading.load_model import building
from shared.loading.model_path import resolve_model_path


def load_draft_model(config: EngineConfig, parts: DrafterParts) -> tuple[DraftConfig, DraftModel]:
    """`ValueError` for one that is missing or does not fit the target."""
    assert config.speculative_draft_model is not None
    assert config.speculative in ("eagle", "eagle3", "nextn")
    folder = resolve_model_path(config.speculative_draft_model, config.load_format)
    if config.load_format != "dummy":
        refuse_language_model(folder, config.speculative, config.speculative_draft_model)
    draft_config = DraftConfig.from_pretrained(folder, parts.model_config, config.speculative)
    if config.load_format == "dummy":
        weights = dummy_draft_weights(draft_config, config.random_seed, parts.device)
    else:
        weights = iterate_draft_weights(folder)
    component = parts.component
    with building(parts.device, parts.dtype):
        model_class = component("draft_models").draft_model_class(draft_config.draft_format)
        model: DraftModel = model_class(draft_config, component("layers"), component("moe"))
    model.load_weights(weights)
    model.share(parts.model)
    check_windows(config, draft_config.model)
    return draft_config, model.eval()


def padding_token_ids(
    config: EngineConfig, parts: DrafterParts, draft_config: DraftConfig, model: DraftModel
) -> torch.Tensor | None:
    """Which of the draft model's ids stand for no token, bool [vocab_size]; None: all stand for one.
    `ValueError` if those that do are fewer than the beams."""
    draft_ids = torch.arange(draft_config.model.vocab_size, device=parts.device)
    is_token = model.to_target_ids(draft_ids) < parts.num_token_ids
    num_tokens, top_k = int(is_token.sum()), draft_shape(config).top_k
    if num_tokens < top_k:
        raise ValueError(
            f"speculative_topk={top_k}: the draft model has {num_tokens} ids that stand for a token"
        )
    return None if num_tokens == len(draft_ids) else ~is_token
