"""Clauses of drafting: the choice of tokens, beams and nodes."""

from __future__ import annotations

import math
from typing import Any

import torch

from diptych.shared.interfaces import DraftTreeOps
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_raises,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import amid_poison
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.draft_trees import (
    Asked,
    Drafted,
    draft,
    drafting,
    expect_tree,
    expected_tree,
    linked,
)
from diptych.shared.types import TopTokens


class Logits(Case):
    """Random logits with NaN around them in memory; with ties they are integers."""

    has_ties: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def check(self) -> None:
        if not 1 <= self.k <= self.vocab_size:
            raise ValueError("k tokens of a vocabulary")

    def draw(self) -> torch.Tensor:
        logits = Inputs(self.seed).normal(self.num_rows, self.vocab_size, std=2.0)
        return amid_poison((logits.round() if self.has_ties else logits).to(self.dtype))


@contract(
    "The k largest logits of each row come in order, ties lowest id first, with their probabilities.",
    table(
        "num_rows vocab_size k has_ties dtype seed",
        ("one token", 1, 1, 1),
        ("the whole vocabulary", 3, 5, 5),
        ("small", 7, 63, 4),
        *((f"ties of {type_name(dtype)}", 5, 300, 8, True, dtype) for dtype in FLOAT_TYPES),
        ("large", 3, 9001, 10, False, torch.float32, 1),
        ("large, ties", 3, 4097, 10, True, torch.float32, 2),
        ("no rows", 0, 7, 2),
        of=Logits,
    ),
)
def top_tokens(impl: type[DraftTreeOps], case: Logits) -> None:
    logits = case.draw()
    top = Asked(impl).top_tokens(logits, case.k)
    rows = logits.double().tolist()
    ids = [sorted(range(len(row)), key=lambda i: (-row[i], i))[: case.k] for row in rows]
    shape = (case.num_rows, case.k)
    expect_equal("ids", top.token_ids.cpu(), torch.tensor(ids, dtype=torch.int64).view(shape))
    probs = [[math.exp(row[i]) / sum(map(math.exp, row)) for i in best] for row, best in zip(rows, ids)]
    expected = torch.tensor(probs, dtype=torch.float64).view(shape)
    expect_close("probabilities", top.probs, expected, tolerance("softmax", torch.float32))
    expect_equal("their type", top.probs.dtype, torch.float32)


@contract(
    "A row without a softmax gets the first ids with probability 0, and disturbs no other; logits of -inf "
    "have probability 0.",
    EXAMPLE,
)
def rows_without_softmax(impl: type[DraftTreeOps], case: Case) -> None:
    nan, inf = math.nan, math.inf
    rows = [
        [1.0, nan, 3.0, 0.0],
        [1.0, 2.0, inf, 0.0],
        [-inf] * 4,
        [-inf, -inf, 5.0, -inf],
        [0.0, 1.0, 1.0, 0],
    ]
    top = Asked(impl).top_tokens(torch.tensor(rows, device=check_device()), 3)
    ids = [[0, 1, 2], [0, 1, 2], [0, 1, 2], [2, 0, 1], [1, 2, 0]]
    expect_equal("ids", top.token_ids.tolist(), ids)
    expect_equal(
        "probabilities of the first four", top.probs[:4].tolist(), [[0.0] * 3] * 3 + [[1.0, 0.0, 0.0]]
    )
    expect_true("the last row's are its own", bool((top.probs[4] > 0.1).all()), top.probs[4].tolist())


@contract("No k below 1 or above the vocabulary, and no tree without a root.", EXAMPLE)
def refusals(impl: type[DraftTreeOps], case: Case) -> None:
    logits = torch.zeros(2, 5, device=check_device())
    for k in (0, 6):
        expect_raises(f"k = {k} of 5", ValueError, impl().top_tokens, logits, k)
    drafts = Drafted("")
    steps = draft(impl(), drafts.tops())
    expect_raises("no node", ValueError, impl().build, drafts.root_ids(), steps, 0)


SIZES = "batch_size top_k num_steps num_draft_tokens grid seed"
DRAFTED = table(
    SIZES,
    ("one chain", 1, 1, 1, 2),
    ("chains", 3, 1, 5, 6, 4, 1),
    ("chains, not all of them", 3, 1, 5, 4, 4, 2),
    ("two by two", 4, 2, 3, 8, 4, 3),
    ("three wide", 5, 3, 3, 9, 4, 4),
    ("four wide, ties everywhere", 3, 4, 5, 16, 1, 5),
    ("four wide, few ties", 3, 4, 5, 16, 9973, 6),
    ("five wide, one step", 2, 5, 1, 4, 4, 7),
    ("wide and deep", 2, 10, 8, 60, 50, 8),
    ("exactly all candidates", 2, 3, 3, 22, 4, 9),
    ("fewer candidates than nodes", 3, 2, 2, 16, 4, 10),
    ("only the root", 2, 2, 2, 1, 4, 11),
    ("no request", 0, 2, 2, 4),
    of=Drafted,
)


@contract("The first step's beams are its candidates.", (DRAFTED[0], DRAFTED[4], DRAFTED[12]))
def first_beams(impl: type[DraftTreeOps], case: Drafted) -> None:
    top = case.tops()[0]
    beams = Asked(impl).first_beams(top)
    numbers = torch.arange(case.top_k, device=check_device()).expand_as(top.token_ids)
    expect_equal("token_ids", beams.token_ids, top.token_ids)
    expect_equal("scores", beams.scores, top.probs)
    expect_equal("parents", beams.parents, torch.zeros_like(numbers))
    expect_equal("indices", beams.indices, numbers)
    expect_equal("candidate_ids", beams.candidate_ids, top.token_ids)
    expect_equal("candidate_scores", beams.candidate_scores, top.probs)


@contract(
    "Of a later step's K * K candidates the K best go on, best first, ties by lower number; each says which "
    "beam it comes from, and all are recorded.",
    DRAFTED[1:8],
)
def next_beams(impl: type[DraftTreeOps], case: Drafted) -> None:
    tops = case.tops()
    steps = draft(Asked(impl), tops)
    for request in range(case.batch_size):
        for step, (candidates, best) in zip(steps, drafting(tops, request)):
            expect_equal("token_ids", step.token_ids[request].tolist(), [c.token_id for c in best])
            expect_equal("scores", step.scores[request].tolist(), [c.score for c in best])
            expect_equal("parents", step.parents[request].tolist(), [c.beam for c in best])
            expect_equal("indices", step.indices[request].tolist(), [c.index for c in best])
            expect_equal(
                "candidate_ids", step.candidate_ids[request].tolist(), [c.token_id for c in candidates]
            )
            scores = step.candidate_scores[request].tolist()
            expect_equal("candidate_scores", scores, [c.score for c in candidates])


@contract(
    "The best candidates of all steps become nodes, in the order of their numbers, each below its parent; "
    "too few of them are padded.",
    DRAFTED,
)
def build(impl: type[DraftTreeOps], case: Drafted) -> None:
    ops, tops, num = Asked(impl), case.tops(), case.num_draft_tokens
    tree = ops.build(case.root_ids(), draft(ops, tops), num)
    roots = case.root_ids().tolist()
    found = [expected_tree(tops, b, roots[b], num) for b in range(case.batch_size)]
    expect_tree(tree, linked([ids for ids, _ in found], [parents for _, parents in found], num))


@contract(
    "No node comes without its parent, also where probabilities are 1 or 0 and scores equal the parent's.",
    table(
        SIZES,
        *((4, width, 4, num, 1, num) for width, num in ((2, 5), (3, 7), (3, 4), (4, 12))),
        name="{top_k} wide, {num_draft_tokens} nodes",
        of=Drafted,
    ),
)
def no_orphans(impl: type[DraftTreeOps], case: Drafted) -> None:
    tops = case.tops()
    tree = impl().build(case.root_ids(), draft(impl(), tops), case.num_draft_tokens)
    for b in range(case.batch_size):
        candidates = [c for step, _ in drafting(tops, b) for c in step]
        ways = {tuple(_way(c)): c.score for c in candidates}
        parents, ids = tree.parents[b].tolist(), tree.token_ids[b].tolist()
        for n in range(1, int(tree.num_nodes[b])):
            expect_true("the parent comes first", 0 <= parents[n] < n, (n, parents[n]))
            way, m = [], n
            while m > 0:
                way.append(ids[m])
                m = parents[m]
            expect_true("the way to the root was drafted", tuple(way) in ways, way)


def _way(candidate: Any) -> list[int]:
    way: list[int] = []
    while candidate is not None:
        way.append(candidate.token_id)
        candidate = candidate.parent
    return way


@contract(
    "With one beam the tree is a chain of what was drafted.",
    table(SIZES, ("chain", 4, 1, 6, 7, 4, 3), of=Drafted),
)
def one_beam_is_a_chain(impl: type[DraftTreeOps], case: Drafted) -> None:
    case = case.replace(top_k=1, num_draft_tokens=case.num_steps + 1)
    tops = case.tops()
    tree = impl().build(case.root_ids(), draft(impl(), tops), case.num_draft_tokens)
    nodes = torch.arange(case.num_draft_tokens, device=check_device()).expand_as(tree.parents)
    expect_equal("parents", tree.parents, nodes - 1)
    expect_equal("depths", tree.depths, nodes.contiguous())
    drafts = torch.cat([top.token_ids.view(case.batch_size, 1) for top in tops], dim=1)
    expect_equal("drafts", tree.token_ids[:, 1:], drafts)
    expect_equal("visible", tree.visible[0], torch.ones_like(tree.visible[0]).tril())


@contract("Requests do not disturb one another: a batch's trees are those of its rows.", (DRAFTED[4],))
def rows_alone(impl: type[DraftTreeOps], case: Drafted) -> None:
    tops, roots = case.tops(), case.root_ids()
    together = impl().build(roots, draft(impl(), tops), case.num_draft_tokens)
    for b in range(case.batch_size):
        own = [TopTokens(top.probs[b : b + 1], top.token_ids[b : b + 1]) for top in tops]
        alone = impl().build(roots[b : b + 1], draft(impl(), own), case.num_draft_tokens)
        expect_equal("token_ids", together.token_ids[b], alone.token_ids[0])
        expect_equal("parents", together.parents[b], alone.parents[0])
