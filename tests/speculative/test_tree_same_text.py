"""Decoding by trees writes what plain decoding writes, for every sampling parameter and every draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diptych.shared import registry
from diptych.shared.tools.conformance.oracles.sampling_oracle import ADJUSTED, KINDS
from diptych.shared.types import Req
from tests.speculative.toy import (
    Drafter,
    ToyTarget,
    decode_by_trees,
    decode_plainly,
    model_drafter,
    prophet,
    random_drafter,
)

TARGET = ToyTarget()
DRAFTERS = {
    "the target, one beam": model_drafter(TARGET, 1, 4, 5),
    "the target, three beams": model_drafter(TARGET, 3, 3, 9),
    "the target, more nodes than drafts": model_drafter(TARGET, 2, 2, 12),
    "another model": model_drafter(ToyTarget(seed=1), 4, 3, 12),
    "the least likely": model_drafter(TARGET, 2, 3, 6, flip=True),
    "dice": random_drafter(12, seed=3),
    "only roots": random_drafter(1, seed=4),
}


def requests(num_seeds: int) -> list[Req]:
    return [
        ask.req(seed=100 * i + seed) for seed in range(num_seeds) for i, ask in enumerate((*KINDS, *ADJUSTED))
    ]


def few_requests() -> list[Req]:
    """For Triton's interpreter, which is slow."""
    return requests(1)[::3]


def expect_same_text(
    panel: str,
    drafter: Drafter,
    make_reqs: Callable[[], list[Req]],
    num_rounds: int = 8,
    mask_bits: int | None = None,
) -> list[int]:
    ops, sampler = registry.load("draft_tree", panel)(), registry.load("sampler", panel)()
    plain, reqs = make_reqs(), make_reqs()
    mask = None if mask_bits is None else torch.full((len(reqs), 1), mask_bits, dtype=torch.int32)
    num_accepted = decode_by_trees(TARGET, ops, sampler, reqs, drafter, num_rounds, mask)
    decode_plainly(TARGET, sampler, plain, max(len(req.output_ids) for req in reqs), mask)
    for req, other in zip(reqs, plain):
        assert req.output_ids == other.output_ids[: len(req.output_ids)], req.sampling_params
    return num_accepted


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_that_of_plain_decoding(name: str) -> None:
    num_accepted = expect_same_text("reference", DRAFTERS[name], lambda: requests(6))
    if name.startswith("the target"):
        assert sum(num_accepted) > 0.3 * len(num_accepted), "hardly anything is accepted: little is tested"
    if name == "only roots":
        assert sum(num_accepted) == 0


@pytest.mark.parametrize("name", ["the target, three beams", "dice"])
def test_with_a_mask(name: str) -> None:
    expect_same_text("reference", DRAFTERS[name], lambda: requests(3), mask_bits=0b1011101101)


@pytest.mark.parametrize("name", ["the target, three beams", "dice"])
def test_in_the_optimized_panel(name: str) -> None:
    expect_same_text("optimized", DRAFTERS[name], few_requests, num_rounds=3)


@pytest.mark.parametrize(
    ("panel", "make_reqs"), [("reference", lambda: requests(3)), ("optimized", few_requests)]
)
def test_a_draft_that_knows_the_text_is_accepted_to_its_end(
    panel: str, make_reqs: Callable[[], list[Req]]
) -> None:
    ops, sampler = registry.load("draft_tree", panel)(), registry.load("sampler", panel)()
    plain, reqs = make_reqs(), make_reqs()
    length, num_rounds = 4, 3
    decode_plainly(TARGET, sampler, plain, (length + 1) * num_rounds)
    drafter = prophet([req.all_ids for req in plain], length)
    num_accepted = decode_by_trees(TARGET, ops, sampler, reqs, drafter, num_rounds)
    assert set(num_accepted) == {length}
    assert [req.output_ids for req in reqs] == [req.output_ids for req in plain]
