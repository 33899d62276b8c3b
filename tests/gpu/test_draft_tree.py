"""A round of drafting and verification in one CUDA graph: no synchronization, fixed shapes."""

from __future__ import annotations

import pytest
import torch

from diptych.optimized.speculative.draft_tree import DraftTreeOps
from diptych.reference.speculative.draft_tree import DraftTreeOps as ReferenceOps
from diptych.shared.interfaces import DraftTreeOps as Contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.oracles.draft_trees import draft, expect_tree
from diptych.shared.types import Accepted, DraftTree, TopTokens

pytestmark = pytest.mark.gpu

BS, K, NUM_STEPS, NUM_NODES, VOCAB_SIZE = 5, 4, 5, 16, 32000


def make_logits(seed: int) -> list[torch.Tensor]:
    """Integer scores, so that ties are frequent."""
    generator = torch.Generator().manual_seed(seed)
    rows = [BS] + [BS * K] * (NUM_STEPS - 1)
    return [torch.randint(0, 30, (n, VOCAB_SIZE), generator=generator).float().cuda() for n in rows]


def round_of(ops: Contract, logits: list[torch.Tensor], samples: torch.Tensor) -> tuple[DraftTree, Accepted]:
    tops = [ops.top_tokens(rows, K) for rows in logits]
    shaped = [
        top if i == 0 else TopTokens(*(tensor.view(BS, K, K) for tensor in top)) for i, top in enumerate(tops)
    ]
    # Probabilities of the panels differ in the last bits; multiples of 1/8 do not.
    shaped = [TopTokens((top.token_ids % 8 + 1) / 8, top.token_ids) for top in shaped]
    root_ids = torch.arange(BS, device=samples.device)
    tree = ops.build(root_ids, draft(ops, shaped), NUM_NODES)
    return tree, ops.accept(tree, samples, NUM_STEPS)


def test_a_round_can_be_captured() -> None:
    logits = make_logits(0)
    samples = torch.zeros(BS, NUM_NODES, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        round_of(DraftTreeOps(), logits, samples)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree, accepted = round_of(DraftTreeOps(), logits, samples)

    for seed in range(1, 5):
        for buffer, values in zip(logits, make_logits(seed)):
            buffer.copy_(values)
        graph.replay()
        # Every node samples its first child's token, so that drafts are accepted; then the graph is replayed.
        first_child = tree.token_ids.gather(1, tree.next_token.clamp(min=0))
        samples.copy_(first_child)
        graph.replay()
        expected_tree, expected = round_of(ReferenceOps(), logits, samples)
        expect_tree(tree, expected_tree)
        for ours, theirs in zip(accepted, expected):
            expect_equal("accepted", ours, theirs)
