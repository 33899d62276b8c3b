import math

import numpy as np
import pytest
import scipy
import torch

from diptych.shared.sampling.noise import gumbel_noise, hash_noise
from diptych.shared.tools.conformance.oracles.chi_square import ALPHA

NUM_BUCKETS = 64


def test_hash_keeps_its_published_values() -> None:
    seeds = torch.tensor([0, 1, 42, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 0, 7, 100, 2**31, 5])
    token_ids = torch.tensor([0, 0, 1, 151935, 2, 3])
    expected = [3150628639, 480752577, 3066889057, 788960974, 1945276436, 1418303591]
    assert hash_noise(seeds, positions, token_ids).tolist() == expected


@pytest.mark.parametrize("varied", ["seed", "high half of seed", "position", "token id"])
def test_hash_is_uniform_along_each_argument(varied: str) -> None:
    n, one = torch.arange(100_000), torch.tensor(7)
    seeds = n if varied == "seed" else n << 32 if varied == "high half of seed" else one
    h = hash_noise(seeds, n if varied == "position" else one, n if varied == "token id" else one).expand(
        len(n)
    )
    for bits in (h >> 26, h & 63):  # both ends of the word
        assert scipy.stats.chisquare(np.bincount(bits.numpy(), minlength=NUM_BUCKETS)).pvalue > ALPHA


@pytest.mark.parametrize("stepped", ["seed", "position", "token id"])
def test_neighbours_are_independent(stepped: str) -> None:
    """The noise of one argument and of the next, as a contingency table."""
    n, one = torch.arange(100_000), torch.tensor(3)
    arguments = {"seed": one, "position": one, "token id": one}
    arguments["token id" if stepped != "token id" else "seed"] = n * 2
    h = hash_noise(*arguments.values()) >> 28
    arguments[stepped] = arguments[stepped] + 1
    neighbour = hash_noise(*arguments.values()) >> 28
    table = np.bincount((h * 16 + neighbour).numpy(), minlength=256).reshape(16, 16)
    assert scipy.stats.chi2_contingency(table).pvalue > ALPHA


def test_every_input_bit_flips_about_half_of_the_output() -> None:
    n = torch.arange(2_000)
    base = hash_noise(n, n * 3, n * 5)
    for bit in range(64):
        flipped = hash_noise(n ^ (1 << bit if bit < 63 else -(2**63)), n * 3, n * 5)
        changed = (base ^ flipped).numpy().astype(np.uint64)
        share = np.unpackbits(changed.view(np.uint8)).sum() / (32 * len(n))
        # 64,000 fair bits have a standard deviation of 0.002; rows are not exactly independent, so 10 of them
        assert share == pytest.approx(0.5, abs=0.02), f"seed bit {bit}"


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    g = gumbel_noise(torch.tensor(1), torch.tensor(2), torch.arange(50_000))
    assert g.dtype == torch.float64
    assert scipy.stats.kstest(g.numpy(), scipy.stats.gumbel_r.cdf).pvalue > ALPHA


def test_gumbel_noise_is_finite_at_both_ends() -> None:
    for h in (0, 2**32 - 1):
        v = (h + 0.5) / 2**32
        assert math.isfinite(-math.log(-math.log1p(-v)))
