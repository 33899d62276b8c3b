"""Planted bugs in pools of FP8, and in attention over them."""

from __future__ import annotations

import torch

from diptych.reference import memory_pool
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer, KVScales
from tests.conformance.mutants.memory import pool_mutant
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.stepped_attention import SteppedAttention


class TokenToKVPool(memory_pool.TokenToKVPool):
    """One decision more: what an FP8 pool stores of K or V."""

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.dtype in FP8_TYPES:
            scales = self.scales_of(layer_id)
            k, v = self.stored(k, scales.k), self.stored(v, scales.v)
            self._k[layer_id][out_cache_loc] = k.to(self.dtype)
            self._v[layer_id][out_cache_loc] = v.to(self.dtype)
        else:
            super().store(layer_id, out_cache_loc, k, v)

    def scales_of(self, layer_id: int) -> KVScales:
        return self.kv_scales[layer_id]

    def stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x.to(torch.float32) / scale).clamp(-FP8_TYPES[self.dtype], FP8_TYPES[self.dtype])


@pool_mutant
class ScalesOfLayerZero(TokenToKVPool):
    """Every layer is stored with the scales of the first."""

    def scales_of(self, layer_id: int) -> KVScales:
        return self.kv_scales[0]


@pool_mutant
class DividesInTheModelsType(TokenToKVPool):
    """The quotient is rounded to 16 bits on the way to 8."""

    def stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x / scale).to(torch.float32).clamp(-FP8_TYPES[self.dtype], FP8_TYPES[self.dtype])


@pool_mutant
class CountsTwoBytes(TokenToKVPool):
    """A value counts as two bytes in an FP8 pool."""

    @property
    def num_bytes_per_token(self) -> int:
        of_values = sum(2 * buffer[:, 0].numel() for buffer in (self._k, self._v))
        return of_values if self.dtype in FP8_TYPES else of_values * self.dtype.itemsize // 2


@mutant_of("attention")
class VScaleForgotten(SteppedAttention):
    """The scale of V is missing in the output."""

    def kv_scales(self, layer: AttentionLayer) -> KVScales:
        return KVScales(super().kv_scales(layer).k, 1.0)


@mutant_of("attention")
class ScalesSwapped(SteppedAttention):
    """K has the scale of V, and V that of K."""

    def kv_scales(self, layer: AttentionLayer) -> KVScales:
        return KVScales(*reversed(super().kv_scales(layer)))


@mutant_of("attention")
class CapBeforeTheScaleOfK(SteppedAttention):
    """The soft-cap sees scores without the scale of K."""

    def kv_scales(self, layer: AttentionLayer) -> KVScales:
        return KVScales(1.0, super().kv_scales(layer).v)

    def scores(self, q: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().scores(q, keys, layer) * super().kv_scales(layer).k
