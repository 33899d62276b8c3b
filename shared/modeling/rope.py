"""RoPE frequencies of each pair of dimensions, for every scaling type."""

from __future__ import annotations

import math

import torch

from diptych.shared.config import RopeConfig


def rope_frequencies(rope: RopeConfig, seq_len: int = 0) -> tuple[torch.Tensor, float]:
    """The inverse frequencies, float32 [rotary_dim / 2] on the CPU (angle = position * inverse frequency),
    and a factor for cos and sin. `seq_len`, the longest sequence so far, only matters to "dynamic".

    They are computed in float32, as in training: at position 100,000 a relative difference of 1e-7 is a
    hundredth of a radian.
    """
    if rope.rope_type == "default":
        return _unscaled(rope, rope.theta), 1.0
    if rope.rope_type == "linear":
        return _unscaled(rope, rope.theta) / rope.factor, 1.0
    if rope.rope_type == "dynamic":
        return _dynamic(rope, seq_len), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope), 1.0
    if rope.rope_type == "longrope":
        return _longrope(rope)
    if rope.rope_type == "proportional":
        return _proportional(rope), 1.0
    return _yarn(rope), _yarn_attention_factor(rope)


def rope_angles(rope: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Angles, float32 [num_positions, rotary_dim / 2] on the positions' device, and the factor for cos and
    sin. An angle depends on its position only."""
    inv_freq, factor = rope_frequencies(rope)
    angles = positions[:, None].to(torch.float32) * inv_freq.to(positions.device)
    if rope.rope_type == "dynamic":
        is_long = positions >= rope.original_max_position_embeddings
        for row in is_long.nonzero().flatten().tolist():
            position = int(positions[row])
            angles[row] = (position * rope_frequencies(rope, position + 1)[0]).to(angles.device)
    return angles, factor


def by_axis(values: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """values [3, num_tokens, ..., k * rotary_dim / 2], of positions in time, by rows and by columns ->
    [num_tokens, ..., k * rotary_dim / 2]: each frequency takes the value of its own axis."""
    # --8<-- [start:by-axis]
    frequency = torch.arange(rope.rotary_dim // 2, device=values.device)
    axis = torch.zeros_like(frequency)
    for i, end in enumerate(rope.axis_ends, 1):
        axis[(frequency % 3 == i) & (frequency < end)] = i
    axis = axis.repeat(values.shape[-1] // len(axis))
    return values.gather(0, axis.expand(1, *values.shape[1:]))[0]
    # --8<-- [end:by-axis]


def _unscaled(rope: RopeConfig, theta: float) -> torch.Tensor:
    """theta^(-2i / rotary_dim)"""
    dims = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / theta ** (dims / rope.rotary_dim)


# --8<-- [start:proportional]
def _proportional(rope: RopeConfig) -> torch.Tensor:
    """The first pairs of dimensions turn as in a whole head, the others not at all."""
    inv_freq = _unscaled(rope, rope.theta) / rope.factor
    inv_freq[rope.turning_dim // 2 :] = 0.0
    return inv_freq


# --8<-- [end:proportional]


def _dynamic(rope: RopeConfig, seq_len: int) -> torch.Tensor:
    """ "NTK-aware": a larger base stretches slow dimensions by `factor` and leaves the fastest alone; here it
    grows with the sequence, from the trained length on."""
    stretch = max(seq_len / rope.original_max_position_embeddings, 1.0)
    scale = rope.factor * stretch - (rope.factor - 1.0)
    return _unscaled(rope, rope.theta * scale ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: RopeConfig) -> torch.Tensor:
    """Dimensions that turn more than high_freq_factor times within the trained length are unchanged; those
    that turn less than low_freq_factor times slow down by `factor`; between them the blend is linear."""
    inv_freq = _unscaled(rope, rope.theta)
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    blend = max(rope.high_freq_factor - rope.low_freq_factor, 1e-6)  # equal factors: a step
    kept = (turns - rope.low_freq_factor) / blend
    return torch.lerp(inv_freq / rope.factor, inv_freq, kept.clamp(0.0, 1.0))


# --8<-- [start:longrope]
def _longrope(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Each frequency has a divisor of its own, found by a search. Contexts beyond the
    trained length have another set of them."""
    divisors = torch.tensor(rope.long_factor if rope.is_long else rope.short_factor)
    dims = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / (divisors.to(dims) * rope.theta ** (dims / rope.rotary_dim))
    if rope.attention_factor is not None:
        return inv_freq, rope.attention_factor
    if rope.factor <= 1.0:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


# --8<-- [end:longrope]


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Like llama3, but the blend is linear in the dimension: from the one that turns beta_fast times within
    the trained length (stays) to the one that turns beta_slow times (slows down by `factor`)."""

    def dim_of(turns: float) -> float:
        turns_at_dim_0 = rope.original_max_position_embeddings / (2 * math.pi)
        return rope.rotary_dim * math.log(turns_at_dim_0 / turns) / (2 * math.log(rope.theta))

    first, last = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    dims = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    slowed = ((dims - first) / (last - first)).clamp(0.0, 1.0)
    inv_freq = _unscaled(rope, rope.theta)
    return torch.lerp(inv_freq, inv_freq / rope.factor, slowed)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor of cos and sin, and so of q and k, which compensates for the flatter attention of slower
    angles."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def sharpening(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return sharpening(rope.mscale) / sharpening(rope.mscale_all_dim)
    return sharpening(1.0)
