"""Clauses of the sampler: a row's token depends on the row alone, and a bad row does not affect others."""

from __future__ import annotations

import math

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.sampling_oracle import ADJUSTED, GREEDY, KINDS, Ask, sample

INF, NAN = math.inf, math.nan


@contract("A request's token does not depend on its batch-mates, nor on its place among them.", EXAMPLE)
def batch_mates(impl: type[Sampler], case: Case) -> None:
    asks = [*KINDS, *ADJUSTED, *KINDS]
    logits = Inputs(1).normal(len(asks), 500, std=3.0).cpu()
    reqs = [ask.req(seed=1000 + i) for i, ask in enumerate(asks)]
    positions = list(range(50, 50 + len(asks)))
    together = sample(impl, logits, reqs, positions)
    alone = [sample(impl, logits[i : i + 1], [reqs[i]], [positions[i]])[0] for i in range(len(asks))]
    expect_equal("alone", alone, together)
    order = Inputs(2).permutation(len(asks)).tolist()
    permuted = sample(impl, logits[order], [reqs[i] for i in order], [positions[i] for i in order])
    expect_equal("in another order", permuted, [together[i] for i in order])


@contract("A draw does not depend on the rows beside it: there is no generator that they share.", EXAMPLE)
def neighbours_change_nothing(impl: type[Sampler], case: Case) -> None:
    row, neighbour = [1.0, 0.5, 0.0, 1.5], [0.0, 2.0, 1.0, 0.5]
    reqs = [Ask("").req(seed=seed) for seed in range(20)]
    alone = [sample(impl, [row], [req])[0] for req in reqs]
    for name, rows, i in (("first", [row, neighbour], 0), ("second", [neighbour, row], 1)):
        pairs = [[req, Ask("").req(seed=99)] if i == 0 else [Ask("").req(seed=99), req] for req in reqs]
        together = [sample(impl, rows, pair)[i] for pair in pairs]
        expect_equal(f"tokens of seeds 0 to 19, {name} of two rows", together, alone)


@contract("The same arguments give the same tokens: a sampler keeps nothing from call to call.", EXAMPLE)
def stateless(impl: type[Sampler], case: Case) -> None:
    asks = [*KINDS, *ADJUSTED]
    logits = Inputs(3).normal(len(asks), 100, std=2.0).cpu()
    reqs = [ask.req(seed=i) for i, ask in enumerate(asks)]
    first = sample(impl, logits, reqs)
    sample(impl, logits.flip(0), reqs)
    expect_equal("ids, the second time", sample(impl, logits, reqs), first)


@contract(
    "Noise belongs to the token, not to its rank: a filter that keeps the winner changes nothing.", EXAMPLE
)
def noise_belongs_to_the_token(impl: type[Sampler], case: Case) -> None:
    logits = Inputs(2).normal(64, 200, std=2.0).cpu()
    plain = sample(impl, logits, [Ask("").req(seed=i) for i in range(64)])
    for ask in (Ask("", min_p=1e-9), Ask("", top_k=199), Ask("", top_p=0.999999)):
        expect_equal(f"{ask}", sample(impl, logits, [ask.req(seed=i) for i in range(64)]), plain)
    # Tokens in another order: each keeps its noise, so among equal logits the same token is sampled.
    expect_equal(
        "of equal logits",
        sample(impl, torch.zeros(64, 200), [Ask("", top_k=200).req(seed=i) for i in range(64)]),
        sample(impl, torch.full((64, 200), -3.0), [Ask("").req(seed=i) for i in range(64)]),
    )


@contract("Seed and position decide, and nothing else.", EXAMPLE)
def seed_and_position(impl: type[Sampler], case: Case) -> None:
    row = [[0.0] * 50] * 40
    by_seed = sample(impl, row, [Ask("").req(seed=i) for i in range(40)])
    by_position = sample(impl, row, [Ask("").req(seed=5)] * 40, list(range(40)))
    # 40 draws of 50 tokens give 28 different ones, give or take 2.4.
    expect_true("seeds give different tokens", len(set(by_seed)) > 15, by_seed)
    expect_true("positions give different tokens", len(set(by_position)) > 15, by_position)
    same = sample(impl, row, [Ask("").req(seed=5)] * 40)
    expect_equal("one seed, one position, 40 rows", same, [by_seed[5]] * 40)


@contract("Seeds differ in all their 64 bits.", EXAMPLE)
def all_bits_of_a_seed(impl: type[Sampler], case: Case) -> None:
    seeds = [0, *(1 << bit for bit in range(63)), -(2**63), -1]
    ids = sample(impl, [[0.0] * 5000] * len(seeds), [Ask("").req(seed=seed) for seed in seeds])
    expect_true("different tokens (one pair in 2.3 batches collides)", len(set(ids)) > 60, len(set(ids)))


BAD_ROWS = {
    "NaN first": (NAN, 1.0, 2.0, 0.0),
    "NaN last": (0.0, 1.0, 9.0, NAN),
    "NaN beside inf": (INF, 1.0, NAN, 0.0),
    "all NaN": (NAN,) * 4,
    "nothing left": (-INF,) * 4,
}


@contract(
    "A row with a NaN, or without a token above -inf, gets -1; its mates get what they would without it.",
    tuple(Case(f"{name}, {ask.name}", row=row, ask=ask) for name, row in BAD_ROWS.items() for ask in KINDS),
)
def bad_rows(impl: type[Sampler], case: Case) -> None:
    good = [(0.5, 1.0, 2.0, 1.5), (3.0, 1.0, 2.0, 1.5)]
    reqs = [case.ask.req(seed=i) for i in range(3)]
    alone = sample(impl, good, [reqs[0], reqs[2]])
    expect_equal("ids", sample(impl, [good[0], case.row, good[1]], reqs), [alone[0], -1, alone[1]])
    expect_equal("id of the bad row alone", sample(impl, [case.row], [reqs[1]]), [-1])


@contract("A NaN is found though its token is banned, penalised or filtered.", EXAMPLE)
def hidden_nan(impl: type[Sampler], case: Case) -> None:
    for temperature in (0.0, 1.0):
        asks = [
            Ask("", temperature=temperature, logit_bias=((0, -INF),)),
            Ask("", temperature=temperature, min_new_tokens=1, eos=(0,)),
            Ask("", temperature=temperature, repetition_penalty=1.3, frequency_penalty=1.0, output=(0,)),
            Ask("", temperature=temperature, top_k=2),
        ]
        ids = sample(impl, [[NAN, 1.0, 2.0, 0.5]] * len(asks), [ask.req() for ask in asks])
        expect_equal("ids", ids, [-1] * len(asks))


@contract("A row with every token banned gets -1.", EXAMPLE)
def everything_banned(impl: type[Sampler], case: Case) -> None:
    bias = ((0, -INF), (1, -INF))
    for banned in (Ask("", logit_bias=bias), Ask("", temperature=0.0, logit_bias=bias)):
        for mate in (Ask(""), GREEDY):
            ids = sample(impl, [[1.0, 2.0]] * 3, [banned.req(), mate.req(), banned.req()])
            expect_equal("ids of the banned rows", (ids[0], ids[2]), (-1, -1))
            expect_true("the mate's id", ids[1] in (0, 1), ids[1])
