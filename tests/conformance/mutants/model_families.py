"""Planted bugs in what single families of models add to the decoder."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.mutants.whole_models import mixed_into_every_model


@mixed_into_every_model
class OneRopeForAllLayers:
    """Layers with a window turn by the RoPE of the others."""

    def __init__(self, config, layers, moe):
        super().__init__(replace(config, local_rope=None), layers, moe)


@mixed_into_every_model
class EmbeddingAsStored:
    """Gemma's embedding is not scaled."""

    def __init__(self, config, layers, moe):
        super().__init__(config, layers, moe)
        if config.norms == "both":
            self.embed = self.model.embed_tokens.forward


@mixed_into_every_model
class TemperatureOneStepLate:
    """The temperature grows one token late: at p + 2, where p + 1 is a multiple of floor_scale."""

    def __init__(self, config, layers, moe):
        super().__init__(config, layers, moe)
        for decoder_layer in self.model.layers:
            attn = decoder_layer.self_attn
            if getattr(attn, "temperature", None) is not None and attn.rotary_emb is None:
                forward = attn.forward
                attn.forward = lambda x, p, attention, forward=forward: forward(x, p - 1, attention)
