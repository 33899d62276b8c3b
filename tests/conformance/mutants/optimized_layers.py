"""Planted bugs in the optimized layers, and in models that fuse them."""

from __future__ import annotations

from dataclasses import replace

import torch

import diptych.optimized.layers
import diptych.optimized.models
from diptych.optimized.kernels.linear.rms_norm import add_rms_norm, rms_norm
from diptych.optimized.layers import GeluTanhAndMul, RMSNorm, RotaryEmbedding, SiluAndMul
from diptych.shared.interfaces import CausalLM
from tests.conformance.mutants.mutant import module_with, plant
from tests.planted import Bug


def layer(impl: type) -> Bug:
    """A layer that takes the place of the one it inherits from."""
    changed = module_with(diptych.optimized.layers, **{impl.__base__.__name__: impl})
    return plant("layers", changed, impl, "Optimized")


def layer_of_models(impl: type) -> Bug:
    """The same, where models fuse it."""
    layers = module_with(diptych.optimized.layers, **{impl.__base__.__name__: impl})

    class WithIt:
        def __init__(self, config, _, moe):
            super().__init__(config, layers, moe)

    return in_every_model(WithIt, impl)


def in_every_model(changes: type, wrong: type | None = None) -> Bug:
    """Methods that come before those of the model class of every family."""

    def model_class(architecture: str) -> type[CausalLM]:
        base = diptych.optimized.models.model_class(architecture)
        return type(base.__name__, (changes, base), {})

    impl = module_with(diptych.optimized.models, model_class=model_class)
    return plant("models", impl, wrong or changes, "Optimized")


# Layers


@layer
class RowsLieDensely(RMSNorm):
    """The kernel gets a stride that only whole tensors have."""

    def forward(self, x):
        dense = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
        return rms_norm(dense, self.weight, self.eps)


@layer
class NormsInBfloat16(RMSNorm):
    """x is rounded before it is normed."""

    def forward(self, x):
        return rms_norm(x.bfloat16(), self.weight, self.eps).to(x.dtype)


@layer
class NormsWithoutResidual(RMSNorm):
    """forward goes through the kernel that overwrites what it takes."""

    def forward(self, x):
        return add_rms_norm(x, torch.zeros_like(x), self.weight, self.eps)[0]


@layer
class SiluForGelu(GeluTanhAndMul):
    """The kernel of the other activation."""

    def forward(self, gate, up):
        return SiluAndMul.forward(self, gate, up)


@layer
class TableInHalf(RotaryEmbedding):
    """Cosines and sines are kept in bfloat16."""

    def cos_sin(self, device):
        return super().cos_sin(device).bfloat16().float()


@layer
class UpBeforeGate(SiluAndMul):
    """Gate and up were merged in the other order."""

    def forward(self, gate, up):
        return super().forward(up, gate)


# Layers, fused


def buffers(attention, layer):
    pool = attention.kv_pool
    return pool.k_buffer(layer.layer_id), pool.v_buffer(layer.layer_id)


@layer_of_models
class NormOfQForK(RotaryEmbedding):
    """The heads of k are normed with the weight of q_norm."""

    def rotate_and_store(self, qkv, positions, q_norm, k_norm, attention, layer):
        return super().rotate_and_store(qkv, positions, q_norm, q_norm, attention, layer)


@layer_of_models
class StoresInTheSlotBefore(RotaryEmbedding):
    """Every token's k and v go one slot too low, the first one's to the dummy page."""

    def rotate_and_store(self, qkv, positions, q_norm, k_norm, attention, layer):
        attention = replace(attention, out_cache_loc=attention.out_cache_loc - 1)
        return super().rotate_and_store(qkv, positions, q_norm, k_norm, attention, layer)


@layer_of_models
class StoresInTheFirstLayer(RotaryEmbedding):
    """All layers share one layer's buffers."""

    def rotate_and_store(self, qkv, positions, q_norm, k_norm, attention, layer):
        layer = replace(layer, layer_id=0)
        return super().rotate_and_store(qkv, positions, q_norm, k_norm, attention, layer)


@layer_of_models
class LosesTheLastToken(RotaryEmbedding):
    """The last token of a step is computed, and not stored."""

    def rotate_and_store(self, qkv, positions, q_norm, k_norm, attention, layer):
        k, v = buffers(attention, layer)
        last = attention.out_cache_loc[-1:]
        before = k[last], v[last]
        q = super().rotate_and_store(qkv, positions, q_norm, k_norm, attention, layer)
        k[last], v[last] = before
        return q


@layer
class RowsForColumns(RotaryEmbedding):
    """The sections of rows and columns change places."""

    def _rotate(self, x, positions):
        rope, (a, b, c) = self.rope, self.rope.mrope_section or (0, 0, 0)
        self.rope = replace(rope, mrope_section=(a, c, b)) if a else rope
        try:
            return super()._rotate(x, positions)
        finally:
            self.rope = rope


# Models


@in_every_model
class LosesTheLastPart:
    """What the last part of a row adds is lost."""

    def forward(self, *args, **kwargs):
        given, size = kwargs.get("input_embeds"), self.config.hidden_size
        if given is not None and given.shape[1] > size:
            kwargs["input_embeds"] = given[:, :-size]
        return super().forward(*args, **kwargs)


def each(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


@in_every_model
class KAndVMergedInTheOtherOrder:
    """The rows of v lie where those of k should."""

    def load_weights(self, weights):
        super().load_weights(weights)
        for decoder_layer in self.model.layers:
            views = decoder_layer.self_attn.qkv_proj.weight_views()
            k, v = views["k_proj.weight"], views["v_proj.weight"]
            k[:], v[:] = v.clone(), k.clone()


@in_every_model
class MergedBiasesForgotten:
    """The biases of q, k and v are not merged with their weights."""

    def load_weights(self, weights):
        super().load_weights(weights)
        for decoder_layer in self.model.layers:
            if decoder_layer.self_attn.qkv_proj.bias is not None:
                decoder_layer.self_attn.qkv_proj.bias.data.zero_()


@in_every_model
class LogitsByWayOfHalf:
    """Logits are rounded to bfloat16 on their way to float32."""

    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states).bfloat16().float()
