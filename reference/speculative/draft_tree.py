"""Draft trees: candidates are ranked and linked in PyTorch, and accepted by walking down each tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from diptych.shared.interfaces import draft_tree as contract
from diptych.shared.sampling.logprobs import sort_descending
from diptych.shared.types import Accepted, Beams, DraftTree, TopTokens


class DraftTreeOps(contract.DraftTreeOps):
    def top_tokens(self, logits: torch.Tensor, k: int) -> TopTokens:
        contract.check_top_k(k, logits.shape[-1])
        logits = logits.float()
        token_ids = sort_descending(logits, num=k)[1]
        probs = logits.softmax(dim=-1).gather(-1, token_ids)
        is_bad = probs.isnan().any(dim=-1, keepdim=True)
        first_ids = torch.arange(k, device=logits.device)
        return TopTokens(probs.masked_fill(is_bad, 0.0), torch.where(is_bad, first_ids, token_ids))

    def first_beams(self, top: TopTokens) -> Beams:
        parents = torch.zeros_like(top.token_ids)
        indices = parents + torch.arange(parents.shape[1], device=parents.device)
        return Beams(top.token_ids, top.probs, parents, indices, top.token_ids, top.probs)

    def next_beams(self, beams: Beams, top: TopTokens) -> Beams:
        # --8<-- [start:next-beams]
        k = beams.token_ids.shape[1]
        candidate_ids = top.token_ids.flatten(1)  # [bs, K * K]
        candidate_scores = (beams.scores[:, :, None] * top.probs).flatten(1)
        scores, indices = sort_descending(candidate_scores, num=k)
        token_ids = candidate_ids.gather(1, indices)
        return Beams(token_ids, scores, indices // k, indices, candidate_ids, candidate_scores)
        # --8<-- [end:next-beams]

    def build(self, root_ids: torch.Tensor, steps: Sequence[Beams], num_draft_tokens: int) -> DraftTree:
        contract.check_num_draft_tokens(num_draft_tokens)
        # --8<-- [start:choose-nodes]
        scores = torch.cat([step.candidate_scores for step in steps], dim=1)
        best = sort_descending(scores, num=num_draft_tokens - 1)[1]
        chosen = best.sort(dim=1).values  # ascending numbers: parents before their children
        token_ids = torch.cat([step.candidate_ids for step in steps], dim=1).gather(1, chosen)
        parents = candidate_parents(steps).gather(1, chosen)
        # A node's index is its place among the chosen, less the root, which is before all.
        parents = torch.where(parents < 0, 0, torch.searchsorted(chosen, parents) + 1)
        # --8<-- [end:choose-nodes]
        num_nodes = torch.full_like(root_ids, chosen.shape[1] + 1)
        num_padding = num_draft_tokens - 1 - chosen.shape[1]
        pad = (1, num_padding)
        token_ids = torch.nn.functional.pad(token_ids, pad)
        token_ids[:, 0] = root_ids
        return self.from_parents(token_ids, torch.nn.functional.pad(parents, pad), num_nodes)

    def from_parents(
        self, token_ids: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor
    ) -> DraftTree:
        bs, num = token_ids.shape
        requests, nodes = (
            torch.arange(bs, device=token_ids.device),
            torch.arange(num, device=token_ids.device),
        )
        is_node = nodes < num_nodes[:, None]
        # --8<-- [start:link-tree]
        no_node = num  # one more column, the parent of the root and of padding
        parents = torch.where(is_node & (nodes > 0), parents, no_node)
        visible = torch.zeros(bs, num + 1, num, dtype=torch.bool, device=token_ids.device)
        depths = torch.full((bs, num + 1), -1, device=token_ids.device)
        for n in range(num):  # parents come first, so their row is complete
            visible[:, n] = visible[requests, parents[:, n]]
            visible[:, n, n] = True
            depths[:, n] = depths[requests, parents[:, n]] + 1

        next_token, next_sibling = torch.full_like(depths, -1), torch.full_like(parents, -1)
        for n in reversed(range(1, num)):  # each is linked before its later siblings
            next_sibling[:, n] = next_token[requests, parents[:, n]]
            next_token[requests, parents[:, n]] = n
        # --8<-- [end:link-tree]
        return DraftTree(
            token_ids=token_ids.masked_fill(~is_node, 0),
            parents=parents.masked_fill(parents == no_node, -1),
            depths=depths[:, :num].contiguous(),
            next_token=next_token[:, :num].contiguous(),
            next_sibling=next_sibling.masked_fill(parents == no_node, -1),
            visible=visible[:, :num].contiguous(),
            num_nodes=num_nodes,
        )

    def accept(self, tree: DraftTree, target_ids: torch.Tensor, max_depth: int | None = None) -> Accepted:
        max_depth = tree.num_draft_tokens - 1 if max_depth is None else max_depth
        drafts, samples = tree.token_ids.tolist(), target_ids.tolist()
        first_child, sibling = tree.next_token.tolist(), tree.next_sibling.tolist()
        paths = []
        # --8<-- [start:accept-walk]
        for b in range(tree.batch_size):
            path = [0]
            while len(path) <= max_depth:
                node = path[-1]
                child = first_child[b][node]
                while child >= 0 and drafts[b][child] != samples[b][node]:
                    child = sibling[b][child]
                if child < 0:
                    break
                path.append(child)
            paths.append(path)
        # --8<-- [end:accept-walk]
        return _accepted(
            paths, [[samples[b][n] for n in path] for b, path in enumerate(paths)], tree, max_depth
        )


def candidate_parents(steps: Sequence[Beams]) -> torch.Tensor:
    """[bs, number of candidates of all steps] int64: the number of each candidate's parent, -1: the root."""
    parents, start = [torch.full_like(steps[0].candidate_ids, -1)], 0
    for before, step in pairwise(steps):
        num_each = step.candidate_ids.shape[1] // before.indices.shape[1]
        parents.append((start + before.indices).repeat_interleave(num_each, dim=1))
        start += before.candidate_ids.shape[1]
    return torch.cat(parents, dim=1)


def _accepted(paths: list[list[int]], tokens: list[list[int]], tree: DraftTree, max_depth: int) -> Accepted:
    def padded(rows: list[list[int]]) -> torch.Tensor:
        rows = [row + [-1] * (max_depth + 1 - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.int64).view(-1, max_depth + 1).to(tree.token_ids.device)

    num_accepted = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64)
    return Accepted(padded(paths), padded(tokens), num_accepted.to(tree.token_ids.device))
