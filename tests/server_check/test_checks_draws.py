"""Exact distributions of sampled tokens, as the contract of the sampler has them, and the test of draws."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from diptych.shared.tools.conformance.oracles.sampling_oracle import exact_distribution
from diptych.shared.tools.conformance.server.draws import ALPHA, Asked, Draws, choice_at
from diptych.shared.tools.conformance.server.logprob_tolerance import TABLE
from diptych.shared.tools.conformance.server.seeded import GREEDY, SAMPLED, smallest_fault
from diptych.shared.types import Req, SamplingParams
from tests.house.tree import ROOT

EXACT = TABLE["float32"]
VOCAB_SIZE = 40
PROMPT, OUTPUT = [3, 8, 8, 5, 11, 17, 20, 31], [4, 4, 9]

ASKED = {
    "plain": Asked(),
    "hot": Asked(1.7),
    "top_k": Asked(0.8, top_k=5),
    "top_p": Asked(1.2, top_p=0.7),
    "min_p": Asked(min_p=0.1),
    "penalties": Asked(0.9, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4),
    "bias": Asked(logit_bias={7: 5.0, 4: -100.0}),
}


def logits_of(seed: int, num: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 2.0, (num, VOCAB_SIZE)).astype(np.float32)


@pytest.mark.parametrize("name", ASKED)
def test_the_distribution_is_that_of_the_contract(name: str) -> None:
    asked = ASKED[name]
    more = {"top_k": asked.top_k or -1, "logit_bias": dict(asked.logit_bias)}
    fields = {field: value for field, value in vars(asked).items() if field != "counted"} | more
    req = Req("check", PROMPT, SamplingParams(**fields), 0, frozenset(), output_ids=OUTPUT)
    for seed in range(5):
        (logits,) = logits_of(seed)
        choice = choice_at(logits, asked, PROMPT, OUTPUT, tol=0.0)
        kept = np.where(choice.possible, choice.share, 0.0)
        assert np.allclose(kept / kept.sum(), exact_distribution(logits.tolist(), req), atol=1e-6)


def drawn(asked: Asked, drawn_by: Asked, rivals: Mapping[str, Asked] = {}, length: int = 40) -> Draws:
    """400 tokens sampled by one rule, in answers of `length`, held to another."""
    source = np.random.default_rng(1)
    draws = Draws(random.Random(0), EXACT, rivals=rivals)
    for start in range(0, 400, length):
        logits, output = logits_of(start, length), []
        for row in logits:
            choice = choice_at(row, drawn_by, PROMPT, output, tol=0.0)
            share = np.where(choice.possible, choice.share, 0.0)
            output.append(int(source.choice(VOCAB_SIZE, p=share / share.sum())))
        draws.add(logits, asked, PROMPT, output)
    return draws


@pytest.mark.parametrize("name", ASKED)
def test_a_correct_sampler_passes(name: str) -> None:
    draws = drawn(ASKED[name], ASKED[name])
    assert not draws.impossible
    assert len(draws.places) + draws.num_left_out == 400
    assert draws.num_left_out < 40
    assert draws.p_value() > 1e-3


@pytest.mark.parametrize("name", [name for name in ASKED if name != "plain"])
def test_another_rule_is_found(name: str) -> None:
    draws = drawn(ASKED[name], Asked())
    assert draws.too_many_impossible or draws.p_value() < ALPHA


def test_a_rival_is_found_by_its_likelihood() -> None:
    """The other tests do not find that a prompt counts: its tokens are neither likely nor unlikely."""
    asked = Asked(presence_penalty=1.0)
    counted = Asked(presence_penalty=1.0, counted="prompt and output")
    for drawn_by, is_right in ((asked, True), (counted, False)):
        draws = drawn(asked, drawn_by, {"no penalty": Asked(), "the prompt counts": counted}, length=4)
        assert min(draws.uniform_p_value(), draws.surplus_p_value()) > ALPHA
        assert (draws.p_value() >= ALPHA) is is_right
        assert (draws.log_ratios["the prompt counts"] > 0) is not is_right


def test_end_tokens_are_left_out() -> None:
    draws = Draws(random.Random(0), EXACT, excluded=frozenset({2}))
    draws.add(logits_of(0, 2), Asked(), PROMPT, [2, 3])
    assert (len(draws.places), draws.num_left_out) == (1, 1)


def test_a_token_of_a_padding_row_is_impossible() -> None:
    draws = Draws(random.Random(0), EXACT)
    draws.add(logits_of(0), Asked(), PROMPT, [VOCAB_SIZE])
    assert [each["probability"] for each in draws.impossible] == [0.0]


def test_a_rounded_format_may_cross_the_border_of_a_filter() -> None:
    logits = np.array([[2.0, 1.0, 1.0 - 0.02, -3.0]], np.float32)
    asked = Asked(top_k=2)
    rounded = Draws(random.Random(0), TABLE["bfloat16"])
    rounded.add(logits, asked, [0], [2])
    exact = Draws(random.Random(0), EXACT)
    exact.add(logits, asked, [0], [2])
    assert (len(rounded.impossible), len(exact.impossible)) == (0, 1)


def test_the_page_has_the_smallest_faults_that_single_tokens_show() -> None:
    kinds = [each[dtype] for dtype in ("float32", "bfloat16") for each in (GREEDY, SAMPLED)]
    rows = [
        f"| {num:,} | " + " | ".join(f"{100 * smallest_fault(num, honest):.1f} %" for honest in kinds) + " |"
        for num in (100, 500, 2500)
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "check-server.md").read_text(encoding="utf-8")
