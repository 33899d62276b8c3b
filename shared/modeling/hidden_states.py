"""Running a model for its hidden states, and for those that a draft model wants beside them."""

from __future__ import annotations

import torch

from shared.interfaces.model import CausalLM
from shared.types import ForwardBatch
from shared.types.attention import BatchAttention


def run_model(
    model: CausalLM, batch: ForwardBatch, attention: BatchAttention, layers: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states after the final norm [num_tokens, hidden_size], and what `ModelRunner.capture_hidden`
    says about `layers`."""
    if not layers:
        hidden_states = model(batch.input_ids, batch.positions, attention)
        return hidden_states, None if layers is None else hidden_states
    captured = dict.fromkeys(layers, batch.input_ids)  # any values: the model replaces them
    hidden_states = model(batch.input_ids, batch.positions, attention, captured)
    return hidden_states, torch.cat([captured[layer_id] for layer_id in layers], dim=-1)


def layer_output(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """One tensor of what a decoder layer returned as (x, residual): their sum, or x itself. x may be in
    parts, float32 [parts, num_tokens, hidden_size]."""
    if residual is None:
        return x
    return x + residual if x.dim() == residual.dim() else (x.sum(0) + residual).to(residual.dtype)


def no_hidden_states(model: CausalLM, layers: tuple[int, ...] | None) -> torch.Tensor | None:
    """The second result of `run_model` for a batch without a token."""
    if layers is None:
        return None
    like = next(model.parameters())
    return like.new_empty(0, max(len(layers), 1) * model.config.hidden_size)
