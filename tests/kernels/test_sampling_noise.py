"""The samplers' noise as kernels compute it, against `diptych.shared.sampling.noise`."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_noise import (
    MARGIN,
    gumbel32_of,
    gumbel64,
    gumbel64_of,
    noise_state,
    scaled_logits,
    token_hash,
)
from diptych.shared.sampling.noise import gumbel_noise, hash_noise
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs

SEEDS = (0, 1, 42, -1, 2**63 - 1, -(2**63), 2**32, 123456789012345678)


@triton.jit
def _hash_kernel(seeds_ptr, positions_ptr, hash_ptr, noise_ptr, num_tokens, SIZE: tl.constexpr):
    row = tl.program_id(0)
    state = noise_state(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    ids = tl.arange(0, SIZE)
    at = row * num_tokens + ids
    tl.store(hash_ptr + at, token_hash(state, ids).to(tl.int64), mask=ids < num_tokens)
    tl.store(noise_ptr + at, gumbel64(state, ids), mask=ids < num_tokens)


@triton.jit
def _gumbel_kernel(hash_ptr, fast_ptr, exact_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    h = tl.load(hash_ptr + at).to(tl.uint32)
    tl.store(fast_ptr + at, gumbel32_of(h))
    tl.store(exact_ptr + at, gumbel64_of(h))


@triton.jit
def _scale_kernel(logits_ptr, temperature, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    logits = tl.load(logits_ptr + at)
    tl.store(out_ptr + at, scaled_logits(logits, tl.max(logits, axis=0), temperature))


def test_hash_and_exact_noise() -> None:
    device = check_device()
    seeds = torch.tensor(SEEDS, device=device)
    positions = torch.tensor([0, 7, 2**31, 1, 99999, 3, 2**40, 5], device=device)
    hashes = torch.empty(8, 1000, dtype=torch.int64, device=device)
    noise = torch.empty(8, 1000, dtype=torch.float64, device=device)
    _hash_kernel[(8,)](seeds, positions, hashes, noise, 1000, SIZE=1024)
    words = (seeds[:, None], positions[:, None], torch.arange(1000, device=device))
    expect_equal("hash", hashes, hash_noise(*words))
    # Two logarithms of float64, each good to a unit or two in the last place.
    torch.testing.assert_close(noise, gumbel_noise(*words), rtol=1e-14, atol=1e-14)


def test_fast_noise_is_well_within_half_the_margin() -> None:
    """All the hash's range: ends, the seam at one half, and in between."""
    size = 1 << 17
    edges = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    edges += [1 << bit for bit in range(32)] + [2**32 - (1 << bit) for bit in range(1, 32)]
    rest = np.random.default_rng(0).integers(0, 2**32, size - len(edges))
    hashes = torch.tensor([*edges, *rest.tolist()], device=check_device())
    fast = torch.empty(size, device=hashes.device)
    exact = torch.empty(size, dtype=torch.float64, device=hashes.device)
    _gumbel_kernel[(size // 1024,)](hashes, fast, exact, SIZE=1024)
    v = (hashes.to(torch.float64) + 0.5) * 2.0**-32
    torch.testing.assert_close(exact, -torch.log(-torch.log1p(-v)), rtol=1e-14, atol=1e-14)
    assert (fast - exact).abs().max().item() < 7e-6
    assert MARGIN.value > 4 * 7e-6


def test_scaled_logits_are_the_references_bit_for_bit() -> None:
    logits = Inputs(0).normal(4096, std=20.0)
    for temperature in (1.0, 0.7, 1e-6, 3.3333, 1e30):
        found = torch.empty_like(logits)
        _scale_kernel[(1,)](logits, temperature, found, SIZE=4096)
        expected = (logits - logits.max()) / torch.tensor(temperature, device=logits.device)
        expect_equal(f"temperature {temperature:g}", found, expected)
