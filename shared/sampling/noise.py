"""The sampler's noise: one hash that every implementation computes alike, on any device."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def _mix(h: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words in which every input bit reaches every output bit (multiply, xorshift).
    int64 arithmetic modulo 2^32: the product of two 32-bit words wraps without harm to its low half."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def hash_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 tensors that broadcast -> int64 in [0, 2^32).

    Four rounds, each xors one word into the state, adds an odd constant and mixes: seed's low word, seed's
    high word, position, token id.
    """
    h = torch.zeros((), dtype=torch.int64, device=token_ids.device)
    for word in (seeds & _MASK, (seeds >> 32) & _MASK, positions & _MASK, token_ids & _MASK):
        h = _mix(((h ^ word) + 0x9E3779B9) & _MASK)
    return h


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of the broadcast shape: -log(-log1p(-v)), v in (0, 1).

    float64, except on mps, which has none: there v may round to 1, and its noise to -inf: a token that
    would not have been chosen anyway.
    """
    dtype = torch.float32 if token_ids.device.type == "mps" else torch.float64
    v = (hash_noise(seeds, positions, token_ids).to(dtype) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))
