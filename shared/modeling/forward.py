"""Functions that models, attention backends and model runners of both panels share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from diptych.shared.config.model import AttnTemperature
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import AttentionLayer


def run_model(
    model: CausalLM, batch: ForwardBatch, attention: BatchAttention, layers: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a model: hidden states after the final norm, of attention.rows or of all tokens, and those of
    `layers`, as in `ModelRunner.capture_hidden`."""
    more = {} if batch.embeds is None else {"input_embeds": _input_embeds(model, batch)}
    positions = batch.model_positions
    if not layers:
        hidden_states = model(batch.input_ids, positions, attention, **more)
        if attention.rows is not None and not model.selects_rows:
            hidden_states = hidden_states[attention.rows]
        return hidden_states, None if layers is None else hidden_states
    captured = dict.fromkeys(layers, batch.input_ids)  # any values: the model replaces them
    hidden_states = model(batch.input_ids, positions, attention, captured, **more)
    return hidden_states, torch.cat([captured[layer_id] for layer_id in layers], dim=-1)


def _input_embeds(model: CausalLM, batch: ForwardBatch) -> torch.Tensor:
    """The rows for layer 0, [num_tokens, hidden_size]: embeddings of the batch's token ids, or rows that
    requests give. Behind them in each row what later layers add: zeros, or what requests give."""
    assert batch.embed_rows is not None
    assert batch.embeds is not None
    # --8<-- [start:input-embeds]
    embedded = model.embed(batch.input_ids)
    embedded = F.pad(embedded, (0, batch.embeds.shape[1] - embedded.shape[1]))
    return embedded.index_copy(0, batch.embed_rows, batch.embeds.to(embedded.dtype))
    # --8<-- [end:input-embeds]


def no_hidden_states(model: CausalLM, layers: tuple[int, ...] | None) -> torch.Tensor | None:
    """The second result of `run_model` for a batch without tokens."""
    if layers is None:
        return None
    like = next(model.parameters())
    return like.new_empty(0, max(len(layers), 1) * model.config.hidden_size)


def attention_layers(model: CausalLM) -> list[AttentionLayer]:
    """The attention layers of a model: the `layer` of its attention modules, with their `sinks`."""
    found: list[tuple[Any, Any]] = [
        (getattr(module, "layer", None), getattr(module, "sinks", None)) for module in model.modules()
    ]
    return [replace(layer, sinks=sinks) for layer, sinks in found if isinstance(layer, AttentionLayer)]


def temperature(tuning: AttnTemperature, positions: torch.Tensor) -> torch.Tensor:
    """The factor of q at each position, float32 [num_tokens]."""
    steps = torch.floor((positions.to(torch.float32) + 1.0) / tuning.floor_scale)
    return torch.log1p(steps) * tuning.scale + 1.0


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), which lies within ±cap. 0: no cap."""
    return logits if cap == 0.0 else cap * torch.tanh(logits / cap)


def attention_output(q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor that `AttentionBackend.run` writes: `out`, or a new one. `ValueError` for an `out` or a
    number of heads that the contract does not allow."""
    if layer.num_qo_heads % layer.num_kv_heads != 0:
        raise ValueError(
            f"num_qo_heads ({layer.num_qo_heads}) is not a multiple of num_kv_heads ({layer.num_kv_heads})"
        )
    shape = (*q.shape[:-1], layer.output_dim)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be {q.dtype} "
            f"{shape} on {q.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out of shape {tuple(out.shape)} and strides {out.stride()} is not contiguous")
    return out
