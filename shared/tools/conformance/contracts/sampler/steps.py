"""Clauses of the sampler: its steps and their order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.sampling.processors import ProcessorRows
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.sampling_oracle import (
    ADJUSTED,
    GREEDY,
    KINDS,
    Ask,
    draw_many,
    exact_token,
    make_info,
    run_sampler,
    sample,
)
from diptych.shared.types import Req

INF = math.inf
MARGIN = 1e-5
"""float32 logits of size 10 are off by 1e-6 after a few operations: closer decisions are not compared."""


@contract(
    "Greedy rows take the largest logit, the lowest id on ties.",
    (GREEDY, Ask("almost zero", temperature=1e-7), Ask("top-k of one", top_k=1)),
)
def greedy_ties(impl: type[Sampler], case: Ask) -> None:
    rows = [[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -3.0, -INF, -1.0], [-0.0, 0.0, -1.0, 0.0]]
    expect_equal("ids", sample(impl, rows, [case.req()] * 4), [1, 0, 0, 0])
    expect_equal("id of a row alone", sample(impl, rows[:1], [case.req()]), [1])


@contract("So do the greedy rows of a mixed batch, each for itself.", EXAMPLE)
def greedy_in_a_mixed_batch(impl: type[Sampler], case: Case) -> None:
    logits = Inputs(0).integers(3, 16, 300, dtype=torch.float32).cpu()
    reqs = [(GREEDY if i % 2 else KINDS[i // 2]).req(seed=i) for i in range(16)]
    ids = sample(impl, logits, reqs)
    expect_equal("greedy ids", ids[1::2], [row.index(2.0) for row in logits.tolist()[1::2]])


@contract("Greedy distinguishes logits that softmax does not.", EXAMPLE)
def greedy_is_no_softmax(impl: type[Sampler], case: Case) -> None:
    row = [1e-8, 2e-8, 0.0]  # exp(-1e-8) is 1 in float32
    for ask in (GREEDY, Ask("", top_k=1)):
        expect_equal("alone", sample(impl, [row], [ask.req()]), [1])
        expect_equal("beside a sampled row", sample(impl, [row] * 2, [ask.req(), Ask("").req()])[0], 1)


@contract(
    "A temperature near zero takes the maximum, also where logit / temperature has no float32.",
    grid(
        "{temperature:g} at {offset:g}",
        temperature=(1e-6, 1e-4, 1e-2),
        offset=(0.0, 3e38, -3e38, 60000.0, -1e4),
    ),
)
def near_zero_temperature(impl: type[Sampler], case: Case) -> None:
    gap = max(1.0, abs(case.offset) / 1e4)  # representable beside the offset
    rows = [[case.offset - gap, case.offset, case.offset - 2 * gap]] * 50
    reqs = [Ask("", temperature=case.temperature).req(seed=i) for i in range(50)]
    expect_equal("ids", sample(impl, rows, reqs), [1] * 50)


@contract("A temperature near zero still shares between ties.", EXAMPLE)
def near_zero_temperature_shares(impl: type[Sampler], case: Case) -> None:
    ids = sample(impl, [[4.0, 1.0, 4.0]] * 200, [Ask("", temperature=1e-6).req(seed=i) for i in range(200)])
    expect_equal("ids that come", set(ids), {0, 2})
    expect_true("each about as often (5.6 standard deviations)", 60 < ids.count(0) < 140, ids.count(0))


def kept(name: str, p: tuple[float, ...], expected: tuple[int, ...], **ask: Any) -> Case:
    return Case(name, p=p, ask=Ask(name, **ask), expected=expected)


def in_sequence(name: str, p: tuple[float, ...], expected: tuple[int, ...], **ask: Any) -> Case:
    return kept(name, p, expected, filter_order="sequential", **ask)


TIED = (0.1, 0.2, 0.2, 0.2, 0.2, 0.1)
QUARTERS = (0.25, 0.25, 0.25, 0.25)


@contract(
    "Filters keep exactly these tokens: joint, on the same p, ties by id, the crossing token included.",
    (
        # One after the other, top-p would see .5 / .8 = .625 >= .6 after top-k, and keep one token.
        kept("joint", (0.5, 0.3, 0.2), (0, 1), top_k=2, top_p=0.6),
        # min-p on what top-k left, renormalised, is the same; after top-p by mass it is not.
        kept("top-p does not see what min-p drops", (0.5, 0.3, 0.2), (0, 1), top_p=0.79, min_p=0.5),
        kept("the crossing token stays", (0.2, 0.5, 0.3), (1, 2), top_p=0.51),
        kept("what is enough is enough", (0.2, 0.5, 0.3), (1,), top_p=0.49),
        kept("a sum that is reached exactly", QUARTERS, (0, 1), top_p=0.5),
        kept("top-p keeps one at least", (0.2, 0.5, 0.3), (1,), top_p=1e-6),
        kept("top-k within a tie", TIED, (1, 2), top_k=2),
        kept("top-k across two ties", TIED, (0, 1, 2, 3, 4), top_k=5),
        kept("top-k beyond the vocabulary", TIED, (0, 1, 2, 3, 4, 5), top_k=1000),
        kept("top-p within a tie", TIED, (1, 2, 3), top_p=0.41),
        kept("top-p and top-k within a tie", TIED, (1, 2), top_p=0.35, top_k=3),
        kept("min-p is relative to the maximum", (0.5, 0.25, 0.15, 0.1), (0, 1), min_p=0.4),
        kept("min-p of one keeps ties of the maximum", (0.4, 0.4, 0.2), (0, 1), min_p=1.0),
        kept("min-p includes equality", QUARTERS, (0, 1, 2, 3), min_p=1.0),
    ),
)
def filters_keep(impl: type[Sampler], case: Case) -> None:
    expect_kept(impl, case)


@contract(
    "With filter_order=sequential top_p is a share of what top_k keeps; min_p is relative to the best still.",
    (
        in_sequence("top-p of top-k", (0.5, 0.3, 0.2), (0,), top_k=2, top_p=0.6),
        in_sequence("SGLang's order", (0.4, 0.3, 0.2, 0.1), (0, 1), top_k=3, top_p=0.72, min_p=0.1),
        in_sequence("min-p after both", (0.4, 0.3, 0.2, 0.1), (0,), top_k=3, top_p=0.99, min_p=0.8),
        in_sequence("a share that is reached exactly", QUARTERS, (0,), top_k=2, top_p=0.5),
        in_sequence("the first top_k of a tie", TIED, (1, 2), top_k=3, top_p=0.6),
        in_sequence("without top-k as joint", (0.5, 0.3, 0.2), (0, 1), top_p=0.6),
        in_sequence("without top-p as joint", TIED, (1, 2), top_k=2),
    ),
)
def filters_in_sequence(impl: type[Sampler], case: Case) -> None:
    expect_kept(impl, case)


@agreement(
    "With sequential filters in some rows the tokens are the reference's, in small and large vocabularies.",
    grid("24 x {vocab_size}", num_rows=24, vocab_size=(50, 5000)),
)
def same_tokens_in_sequence(impl: type[Sampler], case: Case, reference: type[Sampler]) -> None:
    logits = Inputs(3).normal(case.num_rows, case.vocab_size, std=2.0)
    joint = Ask("", temperature=1.5, top_k=9, top_p=0.6, min_p=0.05)
    asks = joint, replace(joint, filter_order="sequential"), *KINDS
    reqs = [asks[i % len(asks)].req(seed=i) for i in range(case.num_rows)]
    expect_equal("ids", sample(impl, logits, reqs), sample(reference, logits, reqs))


def expect_kept(impl: type[Sampler], case: Case) -> None:
    found = draw_many(impl, [math.log(p) for p in case.p], case.ask.req(), num_draws=4_000)
    # 4,000 draws miss a token of probability 0.1 with a probability of 1e-183.
    expect_equal("tokens that come", sorted(set(found.tolist())), list(case.expected))


class Batch(Case):
    """Rows of random logits on a grid of 1/8 (many ties) or not; row i asks for kind i, i + 1, ..."""

    has_ties: bool = False
    seed: int = 0

    def check(self) -> None:
        if self.vocab_size < 10:
            raise ValueError("the kinds name tokens up to 9")

    def draw(self) -> tuple[torch.Tensor, list[Ask], list[int]]:
        logits = Inputs(self.seed).normal(self.num_rows, self.vocab_size, std=2.0).cpu()
        asks = [*KINDS, *ADJUSTED]
        asks = [asks[(i + self.seed) % len(asks)] for i in range(self.num_rows)]
        positions = [(7 * i) % 50 for i in range(self.num_rows)]
        return (logits * 8).round() / 8 if self.has_ties else logits, asks, positions


BATCHES = (
    *(
        Batch(f"{n} x {v}", num_rows=n, vocab_size=v, seed=n)
        for n, v in ((1, 10), (17, 63), (130, 50), (1, 1000), (60, 129))
    ),
    *(
        Batch(f"{n} x {v}, ties", num_rows=n, vocab_size=v, has_ties=True, seed=n)
        for n, v in ((34, 20), (50, 200))
    ),
)


@contract(
    "The token is the one with the largest log p + noise among those kept, as computed in float64.", BATCHES
)
def exact_tokens(impl: type[Sampler], case: Batch) -> None:
    logits, asks, positions = case.draw()
    reqs = [ask.req(seed=100 + i) for i, ask in enumerate(asks)]
    ids = sample(impl, logits, reqs, positions)
    num_compared = 0
    for i, (row, req, position) in enumerate(zip(logits.tolist(), reqs, positions)):
        expected, margin = exact_token(row, req, position)
        if margin > MARGIN:
            expect_equal(f"row {i}, {asks[i].name}", ids[i], expected)
            num_compared += 1
    assert num_compared >= 0.8 * case.num_rows, "too many near ties: the case proves little"


@agreement(
    "For the same seeds the tokens are the reference's, in large vocabularies and batches of all kinds.",
    (
        Batch("24 x 4500", num_rows=24, vocab_size=4500, seed=5),
        Batch("64 x 5000", num_rows=64, vocab_size=5000),
        Batch("16 x 32000", num_rows=16, vocab_size=32000, seed=1),
        Batch("64 x 1000, ties", num_rows=64, vocab_size=1000, has_ties=True),
        Batch("17 x 32000, ties", num_rows=17, vocab_size=32000, has_ties=True, seed=2),
        Batch("1 x 151936", num_rows=1, vocab_size=151936, seed=2),
    ),
)
def same_tokens(impl: type[Sampler], case: Batch, reference: type[Sampler]) -> None:
    logits, asks, positions = case.draw()
    reqs = [ask.req(seed=i) for i, ask in enumerate(asks)]
    expect_equal("ids", sample(impl, logits, reqs, positions), sample(reference, logits, reqs, positions))


class Unfiltered(Case):
    """Rows with a temperature and no filter, some greedy: flat, steep and tied logits, with any offset."""

    seed: int = 0

    def draw(self) -> tuple[torch.Tensor, list[Req]]:
        inputs = Inputs(self.seed)
        logits = inputs.normal(self.num_rows, self.vocab_size).cpu()
        logits *= torch.tensor([0.05, 2.0, 6.0, 1.0])[torch.arange(self.num_rows) % 4, None]
        logits[3::4] = logits[3::4].round()
        logits += inputs.integers(201, self.num_rows, 1, dtype=torch.float32).cpu() - 100
        temperatures = [(1.0, 0.6, 0.0, 3.0, 1.0, 1e-2, 1e-6)[i % 7] for i in range(self.num_rows)]
        return logits, [Ask("", temperature=t).req(seed=i) for i, t in enumerate(temperatures)]


@agreement(
    "So they are where a temperature alone decides, and rows with a NaN, or with no token left, have none.",
    (
        Unfiltered("42 x 5000", num_rows=42, vocab_size=5000),
        Unfiltered("14 x 20000", num_rows=14, vocab_size=20_000, seed=1),
        Unfiltered("1 x 151936", num_rows=1, vocab_size=151_936, seed=2),
    ),
)
def same_tokens_unfiltered(impl: type[Sampler], case: Unfiltered, reference: type[Sampler]) -> None:
    logits, reqs = case.draw()
    expect_equal("ids", sample(impl, logits, reqs), sample(reference, logits, reqs))
    logits[::2] = -INF
    logits[::4, case.vocab_size // 2] = math.nan
    logits[1::4, case.vocab_size - 1] = math.nan
    expected = [-1 if row % 4 < 3 else token for row, token in enumerate(sample(reference, logits, reqs))]
    expect_equal("ids", sample(impl, logits, reqs), expected)


@contract(
    "Masks come after penalties and before the bias: a banned token stays banned, whatever its bias.", EXAMPLE
)
def order_of_steps(impl: type[Sampler], case: Case) -> None:
    penalised = Ask("", temperature=0.0, repetition_penalty=10.0, logit_bias=((0, 3.0),))
    expect_equal("10 / 10 + 3 = 4 > 3.5", sample(impl, [[10.0, 3.5]], [penalised.req()]), [0])
    for temperature in (0.0, 1.0):
        banned = Ask("", temperature=temperature, min_new_tokens=1, eos=(1,), logit_bias=((1, 100.0),))
        ids = sample(impl, [[1.0, 50.0, -80.0]] * 20, [banned.req(seed=i) for i in range(20)])
        expect_equal(f"token 1 is banned, temperature {temperature:g}", ids, [0] * 20)


@contract("vocab_mask bans the tokens whose bit is 0, low bit of the first word first.", EXAMPLE)
def vocab_mask(impl: type[Sampler], case: Case) -> None:
    vocab_size, allowed = 70, {0, 31, 32, 63, 69}  # two words and a bit
    words = [sum(1 << (i % 32) for i in allowed if i // 32 == word) for word in range(3)]
    words = [word - 2**32 if word >= 2**31 else word for word in words]
    mask = torch.tensor([words, [-1, -1, -1]] * 200, dtype=torch.int32, device=check_device())
    reqs = [ask.req(seed=i) for i in range(200) for ask in (Ask(""), GREEDY)]
    logits = torch.zeros(400, vocab_size)
    logits[1::2, 33] = 1.0
    info = replace(make_info(reqs, vocab_size), vocab_mask=mask)
    ids = run_sampler(impl, logits, info, [0] * 400).next_token_ids.tolist()
    # 200 draws miss one of five tokens with a probability of 1e-18.
    expect_equal("tokens of the masked rows", set(ids[::2]), allowed)
    expect_equal("tokens of the others", set(ids[1::2]), {33})


@contract("Processors get the logits of their rows after the bias, and what they return is sampled.", EXAMPLE)
def processors(impl: type[Sampler], case: Case) -> None:
    seen: list[tuple[list[list[int]], list[list[float]]]] = []

    def move(output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append((output_ids, logits.tolist()))
        return logits.roll(1, dims=1)

    logits = torch.tensor([[0.0, 4.0, 1.0, 2.0]] * 4)
    before = logits.clone()
    reqs = [GREEDY.req(), Ask("", temperature=0.0, logit_bias=((3, 9.0),)).req(), GREEDY.req(), GREEDY.req()]
    groups = (ProcessorRows(move, [1, 2], [[7], [8, 9]]),)
    ids = run_sampler(impl, logits, replace(make_info(reqs, 4), processors=groups), [0] * 4).next_token_ids
    expect_equal("ids", ids.tolist(), [1, 0, 2, 1])
    expect_equal("what it got", seen, [([[7], [8, 9]], [[0.0, 4.0, 1.0, 11.0], [0.0, 4.0, 1.0, 2.0]])])
    expect_equal("the logits given", logits.tolist(), before.tolist())


@contract("A logit of +inf is the limit of a large one: tokens that have it share everything.", EXAMPLE)
def infinite_logits(impl: type[Sampler], case: Case) -> None:
    row = [5.0, INF, 1.0, INF]
    for ask in (Ask(""), Ask("", temperature=0.3)):
        ids = sample(impl, [row] * 100, [ask.req(seed=i) for i in range(100)])
        expect_equal("tokens that come", set(ids), {1, 3})
    expect_equal("greedy", sample(impl, [row], [GREEDY.req()]), [1])


@contract("Tokens of -inf are never sampled, however the row asks.", KINDS)
def impossible_tokens(impl: type[Sampler], case: Ask) -> None:
    row = [-5.0, -6.0, -4.0, -INF, -INF]
    ids = sample(impl, [row] * 200, [case.req(seed=i) for i in range(200)])
    expect_true("ids", 0 <= min(ids) <= max(ids) <= 2, (min(ids), max(ids)))
    ids = sample(impl, [[5.0, INF, 1.0, INF]] * 100, [case.req(seed=i) for i in range(100)])
    expect_true("ids beside +inf", set(ids) <= {1, 3}, sorted(set(ids)))
    banned = Ask("", logit_bias=((1, -INF),)).req()
    expect_equal("one of them is banned", sample(impl, [[5.0, INF, 1.0, INF]], [banned]), [3])


@contract("An empty batch gives no tokens.", EXAMPLE)
def empty_batch(impl: type[Sampler], case: Case) -> None:
    output = run_sampler(impl, torch.zeros(0, 7), make_info([], 7), [])
    expect_equal("ids", output.next_token_ids.tolist(), [])
