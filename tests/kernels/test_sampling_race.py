"""Rows that a temperature alone decides: bounds are bounds, and every way gives the reference's tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_noise import log2_of_hash, noise_state, tile_hash, token_hash
from diptych.optimized.sampler import Sampler
from diptych.reference.sampler import Sampler as ReferenceSampler
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.types import SamplingBatchInfo
from tests.changed_modules import changed
from tests.kernels.fast_grid import fast_grid
from tests.kernels.test_sampling import change, expect_same_tokens, hard_logits, plain_info

# The interpreter is numpy, which warns of what IEEE arithmetic defines: inf - inf, log 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLACK = "SLACK, ROUNDING = tl.constexpr(1e-4)"
WAYS = {
    "as it is": (),
    "every part is computed": (change("race", SLACK, "SLACK, ROUNDING = tl.constexpr(1e9)"),),
    "no row is raced": (change("race", '(tl.abs(scaled) < float("inf"))', "(scaled != scaled)"),),
}
ONE_PART = change("race", "last = 32.0 - ", "last = -1e30 - ")


@triton.jit
def _tile_kernel(seed, position, first_id, tile_ptr, plain_ptr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    state = noise_state(tl.cast(seed, tl.int64), tl.cast(position, tl.int64))
    places = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(tile_ptr + places, tile_hash(state, first_id, DEPTH, WIDTH).to(tl.int64))
    tl.store(plain_ptr + places, token_hash(state, first_id + places).to(tl.int64))


@triton.jit
def _log2_kernel(hash_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, log2_of_hash(tl.load(hash_ptr + at).to(tl.uint32)))


def mixed_info(num_rows: int, vocab_size: int, seed: int = 0) -> SamplingBatchInfo:
    """Temperatures of all sizes, and some greedy rows."""
    info = plain_info(num_rows, vocab_size)
    g = torch.Generator().manual_seed(seed)
    choice = torch.tensor([1.0, 1.0, 0.6, 0.2, 3.0, 30.0, 1e-3, 1e-6])
    temperatures = choice[torch.randint(len(choice), (num_rows,), generator=g)].to(check_device())
    is_greedy = (torch.rand(num_rows, generator=g) < 0.2).to(check_device())
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=g).to(check_device())
    temperatures = torch.where(is_greedy, 1.0, temperatures)
    return replace(info, temperatures=temperatures, is_greedy=is_greedy, seeds=seeds)


def test_a_tiles_hashes_are_its_tokens() -> None:
    tile, plain = torch.empty(2, 8, 64, dtype=torch.int64, device=check_device())
    for seed, position, first_id in ((0, 0, 0), (42, 7, 512), (-1, 2**31, 512 * 297), (2**62 + 5, 1, 512)):
        _tile_kernel[(1,)](seed, position, first_id, tile, plain, DEPTH=8, WIDTH=64)
        expect_equal(f"hashes from {first_id}", tile, plain)


def test_bounds_are_never_late() -> None:
    """v < w at both ends of the hash's range, at the seams of float32, and in between."""
    size = 1 << 16
    edges = [0, 1, 2, 2**32 - 1, 2**32 - 2] + [(1 << bit) + off for bit in range(2, 32) for off in (-1, 0, 1)]
    rest = torch.randint(0, 2**32, (size - len(edges),), generator=torch.Generator().manual_seed(0))
    hashes = torch.cat([torch.tensor(edges), rest]).to(check_device())
    found = torch.empty(size, device=hashes.device)
    _log2_kernel[(size // 1024,)](hashes, found, SIZE=1024)
    v = (hashes.to(torch.float64) + 0.5) * 2.0**-32
    late = found - (torch.log2(-torch.log1p(-v)) + 32)
    assert late.max().item() < 1e-5
    assert found[0].item() == -math.inf
    # Nor is a bound early by much where the winner is one of many.
    assert late[(v > 2.0**-20) & (v < 0.01)].min().item() > -0.01


@fast_grid(way={way: way for way in WAYS}, vocab_size={str(size): size for size in (4097, 9001)})
def test_hard_rows(way: str, vocab_size: int) -> None:
    impl = changed("optimized.sampler", *WAYS[way]).Sampler
    positions = torch.arange(18, device=check_device()) * 1000
    logits = hard_logits(18, vocab_size, seed=vocab_size)
    expect_same_tokens(impl, logits, mixed_info(18, vocab_size), positions)
    offsets = Inputs(1).integers(2001, 18, 1, dtype=torch.float32) - 1000  # scaled: of any size
    expect_same_tokens(impl, logits + offsets, mixed_info(18, vocab_size, seed=1), positions)


@pytest.mark.parametrize("std", [1.0, 6.0])
def test_the_part_with_the_earliest_bound_is_mostly_enough(std: float) -> None:
    """And not always: where a token has much of the probability, its bound may be earlier than the winner."""
    num_rows, vocab_size = 50, 9001
    logits = Inputs(2).normal(num_rows, vocab_size, std=std)
    info, positions = plain_info(num_rows, vocab_size), torch.arange(num_rows, device=check_device())
    expected = ReferenceSampler().sample(logits, info, positions).next_token_ids
    expect_equal("ids", Sampler().sample(logits, info, positions).next_token_ids, expected)
    first = changed("optimized.sampler", ONE_PART).Sampler().sample(logits, info, positions).next_token_ids
    num_different = int((first != expected).sum())
    assert num_different <= 1 if std < 6.0 else 0 < num_different < 10


def test_greedy_rows_of_a_mixed_batch_take_the_lowest_of_ties() -> None:
    """Ties within a column, a part, a slice, and across slices; and rows of equal logits."""
    info = plain_info(5, 20_000)
    info = replace(info, is_greedy=torch.arange(5, device=check_device()) < 4)
    logits = torch.full((5, 20_000), -2.0, device=check_device())
    for row, tied in enumerate(([5, 1029, 2053], [130, 1100], [127, 128, 9000], [19_999, 8192, 12_345])):
        logits[row, tied] = 1.0
    positions = torch.arange(5, device=logits.device)
    found = Sampler().sample(logits, info, positions).next_token_ids.tolist()
    assert found[:4] == [5, 130, 127, 8192]
    equal = Sampler().sample(torch.full_like(logits, -math.pi), info, positions).next_token_ids.tolist()
    assert equal[:4] == [0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [151_936, 151_669])
def test_thousands_of_rows(vocab_size: int) -> None:
    num_different = 0
    for seed in range(16):
        logits = Inputs(seed).normal(128, 151_936, std=(0.05, 1.0, 3.0, 8.0)[seed % 4])[:, :vocab_size]
        if seed % 5 == 4:
            logits = (logits * 4).round() / 4
        info = mixed_info(128, vocab_size, seed)
        positions = torch.arange(128, device=logits.device)
        found = Sampler().sample(logits, info, positions).next_token_ids
        expected = ReferenceSampler().sample(logits, info, positions).next_token_ids
        num_different += int((found != expected).sum())
    assert num_different == 0
