"""Expected draft trees, computed in loops over Python objects, and calls of an implementation under check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from diptych.shared.interfaces import DraftTreeOps
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.types import Accepted, Beams, DraftTree, TopTokens


class Drafted(Case):
    """Random drafts of a batch. Probabilities lie on a grid that includes 0 and 1, so ties are frequent."""

    batch_size: int = 2
    top_k: int = 3
    num_steps: int = 3
    num_draft_tokens: int = 8
    grid: int = 4
    seed: int = 0

    def check(self) -> None:
        if min(self.top_k, self.num_steps, self.num_draft_tokens, self.grid) < 1:
            raise ValueError("there must be something to draft")

    def tops(self) -> list[TopTokens]:
        """The draft model's output at each step: [bs, K], then [bs, K, K]."""
        inputs, k = Inputs(self.seed), self.top_k
        shapes = [(self.batch_size, k)] + [(self.batch_size, k, k)] * (self.num_steps - 1)
        tops = []
        for shape in shapes:
            probs = inputs.integers(self.grid + 1, *shape).float() / self.grid
            ids = inputs.uniform(*shape[:-1], 50).argsort(dim=-1)[..., :k]
            tops.append(TopTokens(probs.sort(dim=-1, descending=True).values, ids.contiguous()))
        return tops

    def root_ids(self) -> torch.Tensor:
        return torch.arange(self.batch_size, device=check_device()) + 100


@dataclass(frozen=True)
class Candidate:
    number: int
    token_id: int
    score: float
    parent: Candidate | None
    beam: int = 0  # of the previous step, which it continues
    index: int = 0  # among its step's


def drafting(tops: Sequence[TopTokens], request: int) -> Iterator[tuple[list[Candidate], list[Candidate]]]:
    """List, for each step of one request, the candidates and the ones that are extended."""
    beams: list[Candidate | None] = [None]
    start = 0
    for top in tops:
        probs, ids = top.probs[request].tolist(), top.token_ids[request].tolist()
        k = len(ids)
        if beams == [None]:
            probs, ids = [probs], [ids]
        candidates: list[Candidate] = []
        for a, beam in enumerate(beams):
            for probability, token_id in zip(probs[a], ids[a]):
                score = np.float32(1.0 if beam is None else beam.score) * np.float32(probability)
                number = start + len(candidates)
                candidates.append(Candidate(number, token_id, float(score), beam, a, len(candidates)))
        is_first = beams == [None]
        best = candidates if is_first else sorted(candidates, key=lambda c: (-c.score, c.number))[:k]
        yield candidates, best
        beams, start = list(best), start + len(candidates)


def expected_tree(
    tops: Sequence[TopTokens], request: int, root_id: int, num: int
) -> tuple[list[int], list[int]]:
    """Token ids and parents of one request's nodes, without padding."""
    candidates = [c for step, _ in drafting(tops, request) for c in step]
    chosen = sorted(candidates, key=lambda c: (-c.score, c.number))[: num - 1]
    chosen.sort(key=lambda c: c.number)
    nodes = {c.number: 1 + place for place, c in enumerate(chosen)}
    parents = [0 if c.parent is None else nodes[c.parent.number] for c in chosen]
    return [root_id, *(c.token_id for c in chosen)], [-1, *parents]


def linked(token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], num: int) -> DraftTree:
    """The trees of these nodes, found by walking: up to the root for depths and masks, over all other nodes
    for children and siblings."""
    columns: dict[str, list[list[Any]]] = {field.name: [] for field in fields(DraftTree)}
    for ids, above in zip(token_ids, parents):
        padding = num - len(ids)
        above = [-1, *above[1:], *[-1] * padding]
        paths = [path_to_root(above, n) for n in range(num)]
        children = [[m for m in range(num) if above[m] == n] for n in range(num)]
        later = [[m for m in range(n + 1, num) if above[m] == above[n] >= 0] for n in range(num)]
        columns["token_ids"].append([*ids, *[0] * padding])
        columns["parents"].append(above)
        columns["depths"].append([len(path) - 1 for path in paths])
        columns["next_token"].append([min(found, default=-1) for found in children])
        columns["next_sibling"].append([min(found, default=-1) for found in later])
        columns["visible"].append([[m in path for m in range(num)] for path in paths])
    bs, device = len(token_ids), check_device()
    num_nodes = torch.tensor([len(ids) for ids in token_ids], dtype=torch.int64, device=device)
    columns.pop("num_nodes")
    visible = torch.tensor(columns.pop("visible"), dtype=torch.bool, device=device).view(bs, num, num)
    numbers = {
        name: torch.tensor(rows, dtype=torch.int64, device=device).view(bs, num)
        for name, rows in columns.items()
    }
    return DraftTree(**numbers, visible=visible, num_nodes=num_nodes)


def path_to_root(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors, the node first."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def expected_walk(tree: DraftTree, target_ids: torch.Tensor, max_depth: int) -> Accepted:
    """All nodes whose path from the root equals the target's samples. The walk ends at the deepest. (Of
    siblings with the same token only the first counts.)"""
    paths, tokens = [], []
    for b in range(tree.batch_size):
        parents, ids, samples = (t[b].tolist() for t in (tree.parents, tree.token_ids, target_ids))
        reached = [0]
        for n in range(1, int(tree.num_nodes[b])):
            siblings = [m for m in range(1, n) if parents[m] == parents[n] and ids[m] == ids[n]]
            if parents[n] in reached and ids[n] == samples[parents[n]] and not siblings:
                reached.append(n)
        path = path_to_root(parents, reached[-1])[::-1][: max_depth + 1]
        paths.append(path + [-1] * (max_depth + 1 - len(path)))
        tokens.append([samples[n] if n >= 0 else -1 for n in paths[-1]])
    shape = (tree.batch_size, max_depth + 1)
    columns = (
        torch.tensor(paths, dtype=torch.int64).view(shape),
        torch.tensor(tokens, dtype=torch.int64).view(shape),
        torch.tensor([sum(n > 0 for n in path) for path in paths], dtype=torch.int64),
    )
    return Accepted(*(column.to(check_device()) for column in columns))


class Asked:
    """Calls an implementation and checks after each call that its arguments are unmodified."""

    def __init__(self, impl: type[DraftTreeOps]) -> None:
        self._ops = impl()

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            given = list(_tensors(args))
            before = [tensor.clone() for tensor in given]
            result = run_poisoned(getattr(self._ops, method), *args)
            for i, (tensor, copy) in enumerate(zip(given, before)):
                same = torch.equal(tensor.nan_to_num(nan=9e9), copy.nan_to_num(nan=9e9))
                expect_equal(f"{method}: tensor {i} of its arguments is as before", same, True)
            return result

        return call


def draft(ops: Any, tops: Sequence[TopTokens]) -> list[Beams]:
    """All steps of drafting."""
    steps = [ops.first_beams(tops[0])]
    for top in tops[1:]:
        steps.append(ops.next_beams(steps[-1], top))
    return steps


def expect_tree(tree: DraftTree, expected: DraftTree) -> None:
    """Compare two trees. Links are compared last, so a difference in links implies equal nodes."""
    for name in ("num_nodes", "token_ids", "parents", "depths", "next_token", "next_sibling", "visible"):
        expect_equal(name, getattr(tree, name), getattr(expected, name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
