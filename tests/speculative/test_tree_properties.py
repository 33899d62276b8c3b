"""Any drafts, any trees: both panels against a slow oracle that walks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.kernels.draft.draft_mask import flatten_mask
from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.contracts.draft_tree.links_and_acceptance import Trees
from diptych.shared.tools.conformance.oracles.draft_trees import (
    Drafted,
    draft,
    drafting,
    expect_tree,
    expected_tree,
    expected_walk,
    linked,
)
from tests.properties import given, settings, st

EXAMPLES = {"reference": 150, "optimized": 25}
PANELS = pytest.mark.parametrize("panel", EXAMPLES)
DRAFTS = st.builds(
    Drafted,
    name=st.just("any"),
    batch_size=st.integers(0, 3),
    top_k=st.integers(1, 6),
    num_steps=st.integers(1, 6),
    num_draft_tokens=st.integers(1, 40),
    grid=st.sampled_from([1, 2, 3, 10, 1000]),
    seed=st.integers(0, 2**20),
)
TREES = st.builds(
    Trees,
    name=st.just("any"),
    batch_size=st.integers(0, 3),
    num_draft_tokens=st.integers(1, 40),
    vocab_size=st.integers(1, 5),
    is_chain=st.booleans(),
    is_full=st.booleans(),
    seed=st.integers(0, 2**20),
)


def ops_of(panel: str) -> Any:
    return registry.load("draft_tree", panel)()


def examples(panel: str) -> Any:
    return settings(max_examples=EXAMPLES[panel], derandomize=True)


@PANELS
def test_any_drafts(panel: str) -> None:
    @examples(panel)
    @given(DRAFTS)
    def check(case: Drafted) -> None:
        tops, num = case.tops(), case.num_draft_tokens
        steps = draft(ops_of(panel), tops)
        for b in range(case.batch_size):
            for step, (_, best) in zip(steps, drafting(tops, b)):
                assert step.token_ids[b].tolist() == [c.token_id for c in best]
                assert step.parents[b].tolist() == [c.beam for c in best]
        roots = case.root_ids()
        found = [expected_tree(tops, b, int(roots[b]), num) for b in range(case.batch_size)]
        expected = linked([ids for ids, _ in found], [parents for _, parents in found], num)
        expect_tree(ops_of(panel).build(roots, steps, num), expected)

    check()


@PANELS
def test_any_parents_and_samples(panel: str) -> None:
    @examples(panel)
    @given(TREES, st.integers(0, 40))
    def check(case: Trees, max_depth: int) -> None:
        tree = case.tree()
        expect_tree(ops_of(panel).from_parents(*case.given()), tree)
        targets = Inputs(case.seed + 1).integers(case.vocab_size, *tree.token_ids.shape)
        found, expected = (
            ops_of(panel).accept(tree, targets, max_depth),
            expected_walk(tree, targets, max_depth),
        )
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))

    check()


def test_any_mask() -> None:
    """As FlashInfer takes it."""

    @examples("optimized")
    @given(TREES, st.integers(0, 300))
    def check(case: Trees, longest: int) -> None:
        tree, num = case.tree(), case.num_draft_tokens
        seq_lens = num + Inputs(case.seed).integers(longest + 1, case.batch_size)
        mask = torch.zeros(num * int(seq_lens.sum()), dtype=torch.bool)
        flatten_mask(tree.visible, seq_lens, mask)
        start = 0
        for b, seq_len in enumerate(seq_lens.tolist()):
            block = mask[start : start + num * seq_len].view(num, seq_len)
            assert block[:, : seq_len - num].all()
            assert torch.equal(block[:, seq_len - num :], tree.visible[b])
            start += num * seq_len

    check()
