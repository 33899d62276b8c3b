"""Pearson's chi-square test: do counts follow a distribution?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALPHA = 1e-4
"""A correct sampler fails a test once in 10,000 seeds (the seeds are fixed). With 40,000 draws over ten
tokens, a distribution whose probabilities are off by 4 % each is found with a probability above 0.99."""


def p_value(ids: torch.Tensor, expected: Sequence[float]) -> float:
    """The probability of counts at least as far from `expected` as these; 0 if an impossible value was
    drawn."""
    probabilities = torch.tensor(expected, dtype=torch.float64)
    if ((ids < 0) | (ids >= len(expected))).any():
        return 0.0
    observed = ids.bincount(minlength=len(expected))
    possible = probabilities > 0
    if observed[~possible].any():
        return 0.0
    counts = probabilities[possible] * len(ids)
    assert (counts >= 5).all(), "too few draws for a chi-square test"
    return _tail((observed[possible] - counts).square().div(counts).sum(), int(possible.sum()) - 1)


def independence_p_value(first: torch.Tensor, second: torch.Tensor, num_values: int) -> float:
    """The p-value of pairs under the hypothesis that the two members are independent."""
    table = (first * num_values + second).bincount(minlength=num_values**2).view(num_values, -1).double()
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    counts = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return _tail((table - counts).square().div(counts).sum(), freedom)


def _tail(statistic: torch.Tensor, freedom: int) -> float:
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
