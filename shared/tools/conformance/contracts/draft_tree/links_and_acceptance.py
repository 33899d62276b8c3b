"""Clauses of draft trees: links, masks and acceptance."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from diptych.shared.interfaces import DraftTreeOps
from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.draft_trees import (
    Asked,
    expect_tree,
    expected_walk,
    linked,
    path_to_root,
)
from diptych.shared.types import DraftTree


class Trees(Case):
    """Random trees of up to num_draft_tokens nodes over few token ids; padding has meaningless values."""

    batch_size: int = 3
    num_draft_tokens: int = 8
    vocab_size: int = 4
    is_chain: bool = False
    is_full: bool = False
    seed: int = 0

    def check(self) -> None:
        if min(self.num_draft_tokens, self.vocab_size) < 1:
            raise ValueError("a tree has a root")

    def nodes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids and parents of each tree, without padding."""
        inputs, num = Inputs(self.seed), self.num_draft_tokens
        sizes = inputs.integers(num, self.batch_size).tolist()
        sizes = [num if self.is_full else 1 + size for size in sizes]
        draws = inputs.integers(10**6, self.batch_size, num).tolist()
        ids = inputs.integers(self.vocab_size, self.batch_size, num).tolist()
        above = [
            [-1, *(n - 1 if self.is_chain else draws[b][n] % n for n in range(1, size))]
            for b, size in enumerate(sizes)
        ]
        return [row[:size] for row, size in zip(ids, sizes)], above

    def given(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of from_parents."""
        ids, parents = self.nodes()
        num = self.num_draft_tokens
        rows = [[row + [-7919] * (num - len(row)) for row in table] for table in (ids, parents)]
        for row in rows[1]:
            row[0] = -7919  # the root's parent is not read
        sizes = torch.tensor([len(row) for row in ids], dtype=torch.int64, device=check_device())
        shape = (self.batch_size, num)
        tensors = [
            torch.tensor(table, dtype=torch.int64, device=check_device()).view(shape) for table in rows
        ]
        return tensors[0], tensors[1], sizes

    def tree(self) -> DraftTree:
        return linked(*self.nodes(), self.num_draft_tokens)


TREES = table(
    "batch_size num_draft_tokens vocab_size is_chain is_full seed",
    ("only roots", 3, 1),
    ("two nodes", 4, 2, 4, False, False, 1),
    ("small", 6, 5, 4, False, False, 2),
    ("eight", 5, 8, 4, False, False, 3),
    ("sixteen", 6, 16, 4, False, False, 4),
    ("seventeen, full", 4, 17, 4, False, True, 5),
    ("chains", 4, 9, 4, True, False, 6),
    ("one long chain", 1, 33, 4, True, True, 7),
    ("sixty-four", 3, 64, 3, False, False, 8),
    ("two tokens", 8, 12, 2, False, False, 9),
    ("no request", 0, 4),
    of=Trees,
)


@contract(
    "From parents follow children, siblings in ascending order, depths, and who sees whom; padding is "
    "cleared, whatever it held.",
    TREES,
)
def from_parents(impl: type[DraftTreeOps], case: Trees) -> None:
    expect_tree(Asked(impl).from_parents(*case.given()), case.tree())


@contract(
    "From the root on, the child that the target sampled is accepted, until there is none; the tokens are "
    "the target's, one more than drafts were accepted.",
    TREES,
)
def accept(impl: type[DraftTreeOps], case: Trees) -> None:
    tree = case.tree()
    for draw in range(2):
        shape = (case.batch_size, case.num_draft_tokens)
        targets = Inputs(case.seed + draw).integers(case.vocab_size, *shape)
        found = Asked(impl).accept(tree, targets)
        _expect_accepted(found, expected_walk(tree, targets, case.num_draft_tokens - 1))


@contract(
    "At most max_depth drafts are accepted, and the bonus follows the last of them.",
    (TREES[3], TREES[6], TREES[10]),
)
def max_depth(impl: type[DraftTreeOps], case: Trees) -> None:
    tree = case.tree()
    for depth in (0, 1, 3):
        targets = _perfect(tree)
        _expect_accepted(Asked(impl).accept(tree, targets, depth), expected_walk(tree, targets, depth))


def _perfect(tree: DraftTree) -> torch.Tensor:
    """Samples that accept the path to the (first) deepest node of each tree, unless an earlier sibling has
    the same token."""
    targets = torch.full_like(tree.token_ids, 10**6)
    for b in range(tree.batch_size):
        path = path_to_root(tree.parents[b].tolist(), int(tree.depths[b].argmax()))
        for node, parent in pairwise(path):
            targets[b, parent] = tree.token_ids[b, node]
    return targets


@contract("A draft that is right is accepted to its end.", tuple(case for case in TREES if case.is_chain))
def perfect_chain(impl: type[DraftTreeOps], case: Trees) -> None:
    tree = case.replace(is_chain=True).tree()
    targets = _perfect(tree)
    found = impl().accept(tree, targets)
    expect_equal("accepted drafts", found.num_accepted, tree.num_nodes - 1)
    for b, size in enumerate(tree.num_nodes.tolist()):
        expect_equal("nodes", found.node_indices[b, :size].tolist(), list(range(size)))
        expect_equal("tokens", found.token_ids[b, :size].tolist(), targets[b, :size].tolist())
        expect_equal("drafts are its tokens", found.token_ids[b, : size - 1], tree.token_ids[b, 1:size])
        expect_true("nothing follows", bool((found.token_ids[b, size:] == -1).all()))


@contract(
    "A sample of -1 ends the walk and is handed on; padding is never accepted.",
    (TREES[0], TREES[3], TREES[9]),
)
def no_sample(impl: type[DraftTreeOps], case: Trees) -> None:
    tree = case.tree()
    found = impl().accept(tree, torch.full_like(tree.token_ids, -1))
    expect_equal("accepted", found.num_accepted, torch.zeros_like(tree.num_nodes))
    expect_equal("first tokens", found.token_ids[:, 0], torch.full_like(tree.num_nodes, -1))
    only_roots = replace(tree, num_nodes=torch.ones_like(tree.num_nodes))
    only_roots = impl().from_parents(only_roots.token_ids, only_roots.parents, only_roots.num_nodes)
    found = impl().accept(only_roots, torch.zeros_like(tree.token_ids))  # padding has token 0
    expect_equal("accepted padding", found.num_accepted, torch.zeros_like(tree.num_nodes))


def _expect_accepted(found: object, expected: object) -> None:
    for name in ("num_accepted", "node_indices", "token_ids"):
        expect_equal(name, getattr(found, name), getattr(expected, name))
