"""Clauses of a prepared model runner: steps that verify drafts or fill in blocks, of every batch size;
sampling at nodes."""

from __future__ import annotations

import random
from typing import Any

import torch

from diptych.shared.interfaces import ModelRunner
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.model_runner.decode import (
    KINDS,
    NUM_TOKEN_IDS,
    Decoding,
    PreparedSession,
    requests,
)
from diptych.shared.tools.conformance.contracts.model_runner.forward import model_for
from diptych.shared.tools.conformance.oracles.attention_batches import tree_mask
from diptych.shared.types import ForwardBatch, ForwardMode, Req

NUM_NODES = 6


class Verifying(Decoding):
    """Steps that verify trees of different numbers of requests; every third step decodes. `top_k` 1: trees
    are chains. `block_len`: passes of block diffusion in place of trees; the tokens of a block see each
    other."""

    top_k: int = 2
    num_nodes: int = NUM_NODES  # of the trees; NUM_NODES is the configured number
    block_len: int = 0

    def flags(self) -> dict[str, Any]:
        if self.block_len:
            return {"cuda_graph_block_len": self.block_len}
        num_steps = NUM_NODES - 1 if self.top_k == 1 else 3
        return {
            "speculative": "ngram",
            "speculative_num_steps": num_steps,
            "speculative_topk": self.top_k,
            "speculative_num_draft_tokens": NUM_NODES,
        }

    def batches(self, *sessions: PreparedSession) -> list[tuple[ForwardBatch, ...]]:
        """Yield for each step one batch per session. Requests keep all nodes, as if they were text."""
        dice, num_nodes = random.Random(self.seed + 2), self.block_len or self.num_nodes
        batches = []
        for number, new_ids in enumerate(self.steps()):
            drafts = {
                i: [*ids, *(dice.randrange(331) for _ in range(num_nodes - 1))] for i, ids in new_ids.items()
            }
            if number % 3 == 2:
                others = drafts if number > 5 else new_ids  # a chunk of a prompt may be as long
                batches.append(tuple(session.forward_batch(others) for session in sessions))
                continue
            masks, depths = [], []
            for _ in drafts:
                if self.block_len:
                    masks.append(torch.ones(num_nodes, num_nodes, dtype=torch.bool))
                    depths.append(torch.arange(num_nodes))
                    continue
                parents = [dice.randrange(n) if self.top_k > 1 else n - 1 for n in range(1, num_nodes)]
                masks.append(tree_mask([-1, *parents], 0))
                depths.append(masks[-1].sum(dim=1) - 1)
            prefixes = torch.tensor([sessions[0].lens[i] for i in drafts])
            fields: dict[str, Any] = {
                "forward_mode": ForwardMode.TARGET_VERIFY,
                "positions": (prefixes[:, None] + torch.stack(depths)).flatten(),
                "tree_mask": torch.stack(masks) if self.top_k > 1 else None,
            }
            batches.append(tuple(session.forward_batch(drafts, **fields) for session in sessions))
        return batches


SIZES = (5, 1, 4, 2, 3, 5, 3, 1, 4)
CASES = (
    Verifying("trees", batch_sizes=SIZES, sizes=(1, 2, 4)),
    Verifying("chains", batch_sizes=SIZES, sizes=(1, 2, 4), top_k=1),
    Verifying("trees, pages of 16", batch_sizes=SIZES, sizes=(2, 3), page_size=16),
    Verifying("trees of another size", batch_sizes=SIZES[:4], sizes=(1, 2, 4), num_nodes=4),
    Verifying("chains, windows", batch_sizes=SIZES[:4], sizes=(1, 2, 4), top_k=1, config="qwen3-layer-types"),
    Verifying("trees, windows", batch_sizes=SIZES[:4], sizes=(1, 2, 4), config="qwen3-layer-types"),
    Verifying("blocks of 4", batch_sizes=SIZES[:5], sizes=(1, 2, 4), page_size=4, block_len=4),
    Verifying("trees, bfloat16", batch_sizes=SIZES, sizes=(1, 2, 4), dtype=torch.bfloat16),
)


@contract(
    "Whether steps that verify drafts or fill in blocks are replayed changes no bit of their logits and "
    "hidden states, at any batch size, whatever was decoded or verified before.",
    CASES,
)
def replayed_trees(impl: type[ModelRunner], case: Verifying) -> None:
    model = model_for(case.config, case.dtype)
    replayed, launched = (
        PreparedSession(impl, model, case, graphs, capture_hidden=(1, 0)) for graphs in (True, False)
    )
    expect_equal("logits of the prompts", replayed.prefill(case), launched.prefill(case))
    for number, (batch, same) in enumerate(case.batches(replayed, launched)):
        found, expected = replayed.run(batch), launched.run(same)
        what = f"step {number}, {batch.batch_size} requests"
        expect_equal(f"{what}: logits", found.next_token_logits, expected.next_token_logits)
        expect_equal(f"{what}: hidden states", found.hidden_states, expected.hidden_states)


@agreement(
    "Trees of every batch size give each node its own logits and hidden states, and so do blocks, "
    "whose tokens see each other.",
    CASES,
)
def tree_logits(impl: type[ModelRunner], case: Verifying, reference: type[ModelRunner]) -> None:
    ours = PreparedSession(impl, model_for(case.config, case.dtype), case, capture_hidden=(2,))
    exact = PreparedSession(reference, model_for(case.config, case.dtype).double(), case, capture_hidden=(2,))
    expect_close("prompts", ours.prefill(case), exact.prefill(case), tolerance("logits", case.dtype))
    for number, (batch, same) in enumerate(case.batches(ours, exact)):
        found, expected = ours.run(batch), exact.run(same)
        for name in ("next_token_logits", "hidden_states"):
            expect_close(
                f"step {number}: {name}", getattr(found, name), getattr(expected, name),
                tolerance("logits", case.dtype),
            )  # fmt: skip


@contract(
    "forward_and_sample of a step that verifies gives a token for every node, at the node's own position, "
    "with the parameters of its row.",
    CASES[:2],
)
def sampled_nodes(impl: type[ModelRunner], case: Verifying) -> None:
    dice, kinds = random.Random(case.seed), tuple(KINDS)
    session = PreparedSession(impl, model_for(case.config, case.dtype), case)
    session.prefill(case)
    given: list[tuple[torch.Tensor, list[int]]] = []
    for number, (batch,) in enumerate(case.batches(session)):
        reqs: list[Req] = requests(kinds[number % len(kinds)], len(batch.sampled_positions), dice)
        info = make_sampling_batch_info(reqs, NUM_TOKEN_IDS, check_device())
        output, sampled = session.run_and_sample(batch, info)
        logits = output.next_token_logits.clone()[:, :NUM_TOKEN_IDS]
        is_verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        positions = batch.positions if is_verify else batch.seq_lens - 1
        expected = session.sampler.sample(logits, info, positions)
        expect_equal(f"ids of step {number}", sampled.next_token_ids, expected.next_token_ids)
        given.append((sampled.next_token_ids, sampled.next_token_ids.tolist()))
    for number, (tensor, ids) in enumerate(given):
        expect_equal(f"ids of step {number} at the end", tensor.tolist(), ids)
