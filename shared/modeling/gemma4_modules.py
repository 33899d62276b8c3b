"""What Gemma-4's layers have beside Gemma-3's: an input of each token for each layer, a factor, and in some
models experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diptych.shared.config import ModelConfig
from diptych.shared.config.model import EXPERT_NORMS
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers, RMSNorm
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.interfaces.moe import MoE
from diptych.shared.modeling.decoder_modules import LayerModules, act_fn_class, norm_class


class LayerInput(LayerModules):
    """Before the class of a panel's layer."""

    linear_class: type[nn.Module]
    post_feedforward_layernorm_1: RMSNorm  # with experts, as the next two
    pre_feedforward_layernorm_2: RMSNorm
    post_feedforward_layernorm_2: RMSNorm

    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, moe: type[MoE], *more: Any
    ) -> None:
        super().__init__(config, layer_id, layers, moe, *more)
        self.moe: Any = None
        if config.moe is not None:
            self.moe = moe(config.moe, config.hidden_size)
            if self.moe.experts.hidden_act != config.moe.hidden_act:
                raise ValueError(f"{moe.__name__}: its experts have no hidden_act={config.moe.hidden_act}")
            self.moe.eps = config.rms_norm_eps
            for name, num in (("scale", config.hidden_size), ("per_expert_scale", config.moe.num_experts)):
                setattr(self.moe, name, nn.Parameter(torch.empty(num), requires_grad=False))
            for name in EXPERT_NORMS:
                setattr(self, name, norm_class(config, layers)(config.hidden_size, config.rms_norm_eps))
        self.layer_id, size = layer_id, config.layer_input_size
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.per_layer_input_gate: Any = None
        if size > 0:
            self.per_layer_input_gate = self.linear_class(config.hidden_size, size)
            self.per_layer_act_fn = act_fn_class(config, layers)()
            self.per_layer_projection = self.linear_class(size, config.hidden_size)
            self.post_per_layer_input_norm = norm_class(config, layers)(
                config.hidden_size, config.rms_norm_eps
            )

    # --8<-- [start:experts-beside-mlp]
    def add_experts(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """x: the residual stream, which router and experts read. hidden: from the MLP."""
        moe = self.moe
        if moe is None:
            return hidden
        router_x = F.rms_norm(x, x.shape[-1:], eps=moe.eps) * moe.scale * x.shape[-1] ** -0.5
        topk = moe.topk(moe.gate(router_x))
        weights = topk.topk_weights * moe.per_expert_scale.float()[topk.topk_ids.long()]
        normed: torch.Tensor = self.pre_feedforward_layernorm_2(x)
        routed = moe.experts(normed, topk._replace(topk_weights=weights))
        added: torch.Tensor = self.post_feedforward_layernorm_2(routed)
        return added + self.post_feedforward_layernorm_1(hidden)
        # --8<-- [end:experts-beside-mlp]

    # --8<-- [start:layer-input]
    def add_layer_input(
        self, x: torch.Tensor, attention: BatchAttention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The end of a layer: x of `rows`, of all tokens without."""
        if self.per_layer_input_gate is not None:
            assert attention.layer_inputs is not None
            inputs = attention.layer_inputs[self.layer_id]
            gated = self.per_layer_act_fn(
                self.per_layer_input_gate(x), inputs if rows is None else inputs[rows]
            )
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar
        # --8<-- [end:layer-input]


class LayerInputs(CausalLM):
    """Each token has an embedding for each layer. Before the classes of a panel's decoder."""

    def __init__(self, config: ModelConfig, layers: Layers, *more: Any) -> None:
        super().__init__(config, layers, *more)
        own: Any = self
        size = config.num_hidden_layers * config.layer_input_size
        if size > 0:
            embedding = torch.empty(config.vocab_size, size)
            own.model.embed_tokens_per_layer = nn.Embedding.from_pretrained(embedding, freeze=True)
            own.model.per_layer_model_projection = own.linear_class(config.hidden_size, size)
            own.model.per_layer_projection_norm = norm_class(config, layers)(
                config.layer_input_size, config.rms_norm_eps
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(input_ids) if input_embeds is None else input_embeds
        if self.config.layer_input_size > 0:
            attention = replace(attention, layer_inputs=self.layer_inputs(input_ids, x))
        decoder: Any = super()
        return decoder.forward(input_ids, positions, attention, captured, x)

    # --8<-- [start:layer-inputs]
    def layer_inputs(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x: what goes into layer 0 -> [num_layers, num_tokens, layer_input_size]. Factors
        are rounded to its type."""
        body: Any = getattr(self, "model")  # noqa: B009
        size = self.config.layer_input_size
        of_layers = (self.config.num_hidden_layers, size)
        scale = torch.tensor(size**0.5, dtype=x.dtype, device="cpu").item()
        embedded = (body.embed_tokens_per_layer(input_ids) * scale).unflatten(-1, of_layers)
        projected = body.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        projected = body.per_layer_projection_norm(projected.unflatten(-1, of_layers))
        return ((projected + embedded) * 2**-0.5).transpose(0, 1).contiguous()
        # --8<-- [end:layer-inputs]
