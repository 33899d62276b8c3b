"""Planted bugs in the layers."""

from __future__ import annotations

from dataclasses import replace

import torch

import diptych.reference.layers
from diptych.reference.layers import GeluTanhAndMul, GemmaRMSNorm, RMSNorm, RotaryEmbedding, SiluAndMul
from diptych.shared.modeling.rope import rope_angles
from tests.conformance.mutants.mutant import bugs_in, module_with, plant
from tests.planted import Bug


def layer(impl: type) -> Bug:
    """A layer that takes the place of the one it inherits from."""
    return plant("layers", module_with(diptych.reference.layers, **{impl.__base__.__name__: impl}), impl)


@layer
class SquaresInHalf(RMSNorm):
    """The mean of squares is taken in the input's type: beyond 255 float16 overflows."""

    def forward(self, x):
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)) * self.weight


@layer
class NormsBeforeAdding(RMSNorm):
    """add_and_norm normalises x alone."""

    def add_and_norm(self, x, residual):
        return self.forward(x), x + residual


@layer
class ForgetsTheResidual(RMSNorm):
    """The new residual is the normed sum."""

    def add_and_norm(self, x, residual):
        y = self.forward(x + residual)
        return y, y


@layer
class ForgetsTheOne(GemmaRMSNorm):
    """Multiplies by the weight, not by 1 + weight."""

    def forward(self, x):
        return RMSNorm.forward(self, x)


@layer
class OneAddedInHalf(GemmaRMSNorm):
    """1 + weight is rounded to the weight's type."""

    def forward(self, x):
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight)).to(x.dtype)


@layer
class GeluWithoutTanh(GeluTanhAndMul):
    """The exact gelu: checkpoints were trained with the approximation."""

    def forward(self, gate, up):
        return (torch.nn.functional.gelu(gate.float()) * up).to(up.dtype)


@layer
class IgnoresTheScaling(RotaryEmbedding):
    """The frequencies are always the unscaled ones."""

    def __init__(self, rope, head_dim, context_len):
        super().__init__(replace(rope, rope_type="default"), head_dim, context_len)


@layer
class ForgetsTheAttentionFactor(RotaryEmbedding):
    """yarn's frequencies without its factor on q and k."""

    def __init__(self, rope, head_dim, context_len):
        super().__init__(replace(rope, attention_factor=1.0), head_dim, context_len)


@layer
class PositionsFromOne(RotaryEmbedding):
    """Every token stands one place further on. q·k does not change; the cache of another panel would."""

    def forward(self, positions, q, k):
        return super().forward((positions + 1).clamp(max=self.context_len - 1), q, k)


@layer
class AnglesInHalf(RotaryEmbedding):
    """Angles are computed in bfloat16: neighbours far out stand in the same place."""

    def _cos_sin(self, positions):
        return super()._cos_sin(positions.bfloat16().long().clamp(max=self.context_len - 1))


@layer
class DynamicByTheLongestMate(RotaryEmbedding):
    """All tokens of a step turn with the frequencies of the longest sequence among them."""

    def _cos_sin(self, positions):
        if self.rope.rope_type != "dynamic" or not len(positions):
            return super()._cos_sin(positions)
        longest = rope_angles(self.rope, positions.max()[None])[0] / positions.max().clamp(min=1)
        angles = positions[:, None] * longest
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).unsqueeze(2)


@layer
class RotatesWholeHeads(RotaryEmbedding):
    """rotary_dim is not looked at."""

    def __init__(self, rope, head_dim, context_len):
        super().__init__(replace(rope, rotary_dim=head_dim), head_dim, context_len)


class SiluOfTheSecondHalf(SiluAndMul):
    def forward(self, gate, up):
        return super().forward(up, gate)


@layer
class GateAndUpSwapped(SiluAndMul):
    """silu of the second half."""

    def forward(self, gate, up):
        return SiluOfTheSecondHalf()(gate, up)


@layer
class SiluOverflows(SiluAndMul):
    """x * exp(x) / (1 + exp(x)): NaN where exp is infinite."""

    def forward(self, gate, up):
        gate = gate.float()
        return (gate * gate.exp() / (1 + gate.exp()) * up).to(up.dtype)


bug = bugs_in("layers", "reference.layers", folder="reference.")
# fmt: off
bug("RefusesNoTokens", "RoPE of no tokens is refused.",
    ("layers", "cos, sin = self._cos_sin(positions)",
     "assert len(positions)\n        cos, sin = self._cos_sin(positions)"))
bug("SectionsAreBlocks", "The frequencies of an axis are neighbours, as in Qwen2-VL.",
    ("shared.modeling.rope", "axis[(frequency % 3 == i) & (frequency < end)] = i",
     "axis[sum(rope.mrope_section[:i]) :][: rope.mrope_section[i]] = i"))
