"""Clauses of the sampler: samples follow the exact distribution for all parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_true
from diptych.shared.tools.conformance.oracles.chi_square import ALPHA, independence_p_value, p_value
from diptych.shared.tools.conformance.oracles.sampling_oracle import (
    ADJUSTED,
    GREEDY,
    Ask,
    draw_many,
    exact_distribution,
    make_info,
    repeat_row,
    run_sampler,
)

LOGITS = [1.0, -0.5, 0.3, 2.0, 1.0, -1.2, 0.3, 0.0, 1.7, -0.1]
NUM_DRAWS = 40_000


@contract(
    "40,000 draws follow the exact distribution (chi-square, alpha 1e-4, fixed seeds).",
    (
        Ask("plain"),
        Ask("hot", temperature=3.0),
        Ask("cold", temperature=0.4),
        Ask("top-k", top_k=4),
        Ask("top-k within a tie", top_k=3),
        Ask("top-k beyond the vocabulary", top_k=1000),
        Ask("top-p", top_p=0.7),
        Ask("top-p within a tie", top_p=0.45),
        Ask("top-p keeps one", top_p=0.01),
        Ask("min-p", min_p=0.25),
        Ask("top-k and top-p", top_k=5, top_p=0.8),
        Ask("all filters, cold", temperature=0.7, top_k=8, top_p=0.95, min_p=0.05),
        *ADJUSTED,
    ),
)
def draws(impl: type[Sampler], case: Ask) -> None:
    req = case.req()
    p = p_value(draw_many(impl, LOGITS, req, NUM_DRAWS), exact_distribution(LOGITS, req))
    expect_true("p of the chi-square test is above 1e-4", p > ALPHA, p)


@contract("Rows of different kinds in one batch each follow their own distribution.", EXAMPLE)
def mixed_batch(impl: type[Sampler], case: Case) -> None:
    kinds = (
        GREEDY,
        Ask("plain"),
        Ask("top-k", top_k=4),
        Ask("top-p", top_p=0.7),
        Ask("min-p", min_p=0.25),
        Ask("cold", temperature=0.7),
    )
    num_draws = 20_000
    rows = torch.arange(num_draws * len(kinds))
    one = make_info([kind.req() for kind in kinds], len(LOGITS))
    tensors = {name: value for name, value in vars(one).items() if isinstance(value, torch.Tensor)}
    repeated: dict[str, Any] = {
        name: value.repeat(num_draws, *[1] * (value.dim() - 1)) for name, value in tensors.items()
    }
    seeds = (rows // len(kinds)).to(one.seeds.device)
    info = replace(one, **{**repeated, "seeds": seeds})
    logits = torch.tensor(LOGITS).repeat(len(rows), 1)
    ids = run_sampler(impl, logits, info, torch.zeros_like(rows)).next_token_ids.cpu()
    expect_true("greedy rows", bool((ids[:: len(kinds)] == 3).all()))
    for i, kind in list(enumerate(kinds))[1:]:
        p = p_value(ids[i :: len(kinds)], exact_distribution(LOGITS, kind.req()))
        expect_true(f"{kind.name}: p is above 1e-4", p > ALPHA, p)


@contract(
    "Tokens at consecutive positions are independent, and so are those of consecutive seeds.",
    grid("{stepped}", stepped=("seed", "position")),
)
def independence(impl: type[Sampler], case: Case) -> None:
    n, zeros = torch.arange(NUM_DRAWS), torch.zeros(NUM_DRAWS, dtype=torch.int64)
    seeds, positions = (n, zeros) if case.stepped == "seed" else (zeros, n)
    info = repeat_row(make_info([Ask("", temperature=2.0).req()], len(LOGITS)), seeds)
    logits = torch.tensor(LOGITS).repeat(len(n), 1)
    ids = run_sampler(impl, logits, info, positions).next_token_ids.cpu()
    p = independence_p_value(ids[0::2], ids[1::2], len(LOGITS))
    expect_true("p of the chi-square test is above 1e-4", p > ALPHA, p)
