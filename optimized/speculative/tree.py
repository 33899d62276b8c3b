"""Speculation with trees: several drafts per position, of which verification keeps at most one.

Differs from reference: every round moves the KV of the same number of slots, so that the CPU reads nothing.
Assumes that the slots of a round are in order in the row. Loses the moves of KV that is already in its place.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.optimized.speculative.chain import ChainRound
from diptych.shared.types import DraftBatch, DraftTree, ForwardBatch


class TreeRound(ChainRound):
    """A round with trees. It differs from chains: a node sees only its ancestors, the walk may follow any
    child, and accepted nodes are not the first ones, so their KV is moved."""

    def _verify_batch(self, batch: DraftBatch, tree: DraftTree) -> ForwardBatch:
        return replace(super()._verify_batch(batch, tree), tree_mask=tree.visible)

    # --8<-- [start:keep-accepted-slots]
    def _keep_slots(
        self, batch: DraftBatch, tree: DraftTree, nodes: torch.Tensor, is_behind: torch.Tensor
    ) -> None:
        """Move the KV of accepted drafts to the first slots. The number of moves is
        constant: behind a path each slot is moved to itself. (The root is in the first
        slot.)"""
        assert self.parts.kv_pool is not None
        slots = batch.slots[:, : tree.num_draft_tokens]
        targets = slots[:, 1 : nodes.shape[1]]
        sources = slots.gather(1, nodes[:, 1:])
        sources = torch.where(is_behind[:, 1:], targets, sources)
        self.parts.kv_pool.move(targets.flatten(), sources.flatten())

    # --8<-- [end:keep-accepted-slots]
