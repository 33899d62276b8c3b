"""Planted bugs in draft trees: drafting, linking, masks, accepting."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.speculative.draft_tree import DraftTreeOps
from diptych.shared.types import TopTokens
from tests.conformance.mutants.mutant import bugs_in, mutant_of

# Drafting


@mutant_of("draft_tree")
class TopTokensOfTheLastOfTies(DraftTreeOps):
    """Of equal logits the highest id comes first."""

    def top_tokens(self, logits, k):
        probs, token_ids = super().top_tokens(logits.flip(-1), k)
        is_bad = (probs == 0).all(-1, keepdim=True)
        return TopTokens(probs, torch.where(is_bad, token_ids, logits.shape[-1] - 1 - token_ids))


@mutant_of("draft_tree")
class TopProbabilitiesAreRenormalised(DraftTreeOps):
    """The k probabilities add up to 1."""

    def top_tokens(self, logits, k):
        probs, token_ids = super().top_tokens(logits, k)
        return TopTokens(probs / probs.sum(-1, keepdim=True).clamp(min=1e-9), token_ids)


@mutant_of("draft_tree")
class BeamsGoOnFromTheirColumn(DraftTreeOps):
    """The parent of candidate a * K + c is taken to be c."""

    def next_beams(self, beams, top):
        found = super().next_beams(beams, top)
        return found._replace(parents=found.indices % beams.token_ids.shape[1])


@mutant_of("draft_tree")
class NodesOfTheBeamsOnly(DraftTreeOps):
    """Candidates that did not go on as beams are no nodes: a beam search, not a tree."""

    def build(self, root_ids, steps, num_draft_tokens):
        def without_others(step):
            kept = torch.zeros_like(step.candidate_scores)
            return step._replace(candidate_scores=kept.scatter(1, step.indices, step.scores))

        return super().build(root_ids, [without_others(step) for step in steps], num_draft_tokens)


@mutant_of("draft_tree")
class OrphansOfTies(DraftTreeOps):
    """Of equal scores the later candidates are chosen: a child without its parent."""

    def build(self, root_ids, steps, num_draft_tokens):
        later = [
            step._replace(candidate_scores=step.candidate_scores + 1e-6 * i) for i, step in enumerate(steps)
        ]
        return super().build(root_ids, later, num_draft_tokens)


@mutant_of("draft_tree")
class OneNodeTooFew(DraftTreeOps):
    """The root is not counted among the nodes."""

    def build(self, root_ids, steps, num_draft_tokens):
        tree = super().build(root_ids, steps, num_draft_tokens)
        return self.from_parents(tree.token_ids, tree.parents, (tree.num_nodes - 1).clamp(min=1))


@mutant_of("draft_tree")
class RootOfTheFirstRequest(DraftTreeOps):
    """Every tree grows from the first request's token."""

    def build(self, root_ids, steps, num_draft_tokens):
        first = root_ids[:1].expand_as(root_ids) if len(root_ids) else root_ids
        return super().build(first, steps, num_draft_tokens)


# Links and masks


@mutant_of("draft_tree")
class SiblingsDescend(DraftTreeOps):
    """The last child comes first."""

    def from_parents(self, token_ids, parents, num_nodes):
        tree = super().from_parents(token_ids, parents, num_nodes)
        first, sibling = torch.full_like(tree.next_token, -1), torch.full_like(tree.next_sibling, -1)
        for b, n in (tree.parents >= 0).nonzero().tolist():
            parent = int(tree.parents[b, n])
            sibling[b, n] = first[b, parent]
            first[b, parent] = n
        return replace(tree, next_token=first, next_sibling=sibling)


@mutant_of("draft_tree")
class PaddingIsTaken(DraftTreeOps):
    """What stands behind the nodes hangs from the root."""

    def from_parents(self, token_ids, parents, num_nodes):
        full = torch.full_like(num_nodes, token_ids.shape[1])
        tree = super().from_parents(token_ids, parents.clamp(min=0), full)
        return replace(tree, num_nodes=num_nodes)


@mutant_of("draft_tree")
class NodesSeeAllBefore(DraftTreeOps):
    """A causal mask: siblings see one another."""

    def from_parents(self, token_ids, parents, num_nodes):
        tree = super().from_parents(token_ids, parents, num_nodes)
        return replace(tree, visible=torch.ones_like(tree.visible).tril())


@mutant_of("draft_tree")
class NodesSeeParentsOnly(DraftTreeOps):
    """Grandparents are forgotten."""

    def from_parents(self, token_ids, parents, num_nodes):
        tree = super().from_parents(token_ids, parents, num_nodes)
        near = tree.depths[:, :, None] - tree.depths[:, None, :] <= 1
        return replace(tree, visible=tree.visible & near)


# Accepting


@mutant_of("draft_tree")
class OnlyFirstChildren(DraftTreeOps):
    """Siblings are not looked at."""

    def accept(self, tree, target_ids, max_depth=None):
        alone = torch.full_like(tree.next_sibling, -1)
        return super().accept(replace(tree, next_sibling=alone), target_ids, max_depth)


@mutant_of("draft_tree")
class DraftsMeetTheirOwnSample(DraftTreeOps):
    """A draft is compared with the sample at itself, one position late."""

    def accept(self, tree, target_ids, max_depth=None):
        found = super().accept(tree, target_ids.roll(1, dims=1), max_depth)
        own = target_ids.gather(1, found.node_indices.clamp(min=0))
        return found._replace(token_ids=torch.where(found.node_indices < 0, -1, own))


@mutant_of("draft_tree")
class NoBonus(DraftTreeOps):
    """The token after the last accepted draft is discarded."""

    def accept(self, tree, target_ids, max_depth=None):
        found = super().accept(tree, target_ids, max_depth)
        last = found.num_accepted[:, None]
        return found._replace(token_ids=found.token_ids.scatter(1, last, -1))


@mutant_of("draft_tree")
class DepthIsNotLimited(DraftTreeOps):
    """max_depth cuts the results, not the walk."""

    def accept(self, tree, target_ids, max_depth=None):
        found = super().accept(tree, target_ids)
        end = None if max_depth is None else max_depth + 1
        return found._replace(node_indices=found.node_indices[:, :end], token_ids=found.token_ids[:, :end])


@mutant_of("draft_tree")
class PaddingIsAccepted(DraftTreeOps):
    """Nodes without a parent count as the root's children."""

    def accept(self, tree, target_ids, max_depth=None):
        full = torch.full_like(tree.num_nodes, tree.num_draft_tokens)
        tree = self.from_parents(tree.token_ids, tree.parents.clamp(min=0), full)
        return super().accept(tree, target_ids, max_depth)


bug = bugs_in("draft_tree", "reference.speculative.draft_tree:DraftTreeOps", folder="reference.speculative.")
# fmt: off
bug("TreesWithoutNodes", "A tree of no node is built.",
    ("draft_tree", "contract.check_num_draft_tokens(num_draft_tokens)",
     "num_draft_tokens = max(num_draft_tokens, 1)"))
bug("FirstBeamsHaveNoNumbers", "All beams of the first step count as candidate 0.",
    ("draft_tree", "indices = parents + torch.arange(parents.shape[1], device=parents.device)",
     "indices = parents"))
