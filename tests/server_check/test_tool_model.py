"""The factors of the adapter in int8."""

import torch

from tests.server_check.tool_model.tool_folder import compressed


def test_factors_are_rounded_to_int8() -> None:
    """A matrix of a lower rank than is saved has rows of zeros in its factors, none of them NaN."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, size, generator=generator) for size in (24, 40))
    for x, y, rank in ((a, b, 2), (a, b, 8), (torch.zeros_like(a), b, 2)):
        parts = compressed(x, y, rank)
        assert (parts["a"].dtype, parts["a"].shape, parts["b"].shape) == (torch.int8, (rank, 24), (rank, 40))
        left, right = (parts[part] * parts[f"{part}_scale"][:, None] for part in "ab")
        exact = y.T @ x
        # each factor is rounded to 1/127 of its largest value: half of that, twice, over two terms
        assert (right.T @ left - exact).abs().max() <= 2 / 127 * exact.abs().max()
