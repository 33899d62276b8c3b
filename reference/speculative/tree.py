"""Speculation with trees: several drafts per position, of which verification keeps at most one."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.speculative.chain import ChainRound
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.types import DraftBatch, DraftTree, ForwardBatch, Req


class TreeRound(ChainRound):
    """A round with trees. It differs from chains: a node sees only its ancestors, the walk may follow any
    child, and accepted nodes are not the first ones, so their KV is moved."""

    def _verify_batch(self, batch: DraftBatch, tree: DraftTree) -> ForwardBatch:
        return replace(super()._verify_batch(batch, tree), tree_mask=tree.visible)

    def _accept(self, tree: DraftTree, target_ids: torch.Tensor) -> list[list[int]]:
        accepted = self.draft_tree.accept(tree, target_ids)
        lens = (accepted.num_accepted + 1).tolist()
        return [nodes[:num] for nodes, num in zip(accepted.node_indices.tolist(), lens)]

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        """With pages of one token, the slots of accepted nodes become the row's next ones. Slots of a larger
        page must stay in order, so KV is moved to the first slots, and the pages behind them are freed."""
        pool, page_size = self.parts.req_to_token_pool, self.parts.allocator.page_size
        kept, unused, targets, sources = [], [], [], []
        # --8<-- [start:keep-accepted-slots]
        for req, path in zip(reqs, paths):
            assert req.req_pool_idx is not None
            start, end = req.kv_committed_len, req.kv_committed_len + len(path)
            slots = pool.read(req.req_pool_idx, start, req.kv_allocated_len).to(self.parts.allocator.device)
            nodes = torch.tensor(path, device=slots.device)
            if page_size == 1:
                kept.append(slots[nodes])
                is_unused = torch.ones_like(slots, dtype=torch.bool)
                is_unused[nodes] = False
                unused.append(slots[is_unused])
                pool.write(req.req_pool_idx, start, kept[-1])
            else:
                kept.append(slots[: len(path)])
                if path != list(range(len(path))):
                    targets.append(kept[-1])
                    sources.append(slots[nodes])
                unused.append(slots[round_up_to_page(end, page_size) - start :])
            req.kv_committed_len = req.kv_allocated_len = end
        if targets:
            assert self.parts.kv_pool is not None
            self.parts.kv_pool.move(torch.cat(targets), torch.cat(sources))
        self.parts.allocator.free(torch.cat(unused))
        # --8<-- [end:keep-accepted-slots]
        return kept
