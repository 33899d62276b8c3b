"""A target whose logits depend on every token of the text, and decoding with it, plainly and by trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from diptych.shared.interfaces import DraftTreeOps, Sampler
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.speculation.node_sampling import expand_to_nodes, make_early_bans
from diptych.shared.types import DraftTree, Req, TopTokens

VOCAB_SIZE = 10
NUM_STATES = 997
Drafter = Callable[[DraftTreeOps, Sequence[Req]], DraftTree]


class ToyTarget:
    def __init__(self, seed: int = 0, blur: float = 0.0) -> None:
        """blur: how far the logits are from those of blur 0."""
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.2 * torch.randn(NUM_STATES, VOCAB_SIZE, generator=generator)
        self.table += blur * torch.randn(NUM_STATES, VOCAB_SIZE, generator=generator)

    def logits(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        states = []
        for text in texts:
            state = 0
            for token_id in text:
                state = (31 * state + token_id + 7) % NUM_STATES
            states.append(state)
        return self.table[states]


def node_texts(req: Req, tree: DraftTree, b: int) -> list[list[int]]:
    """The text up to each node, as `visible` has it."""
    before, ids = req.all_ids[:-1], tree.token_ids[b]
    return [before + ids[tree.visible[b, n]].tolist() for n in range(tree.num_draft_tokens)]


def sample_nodes(
    target: ToyTarget,
    sampler: Sampler,
    reqs: Sequence[Req],
    tree: DraftTree,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """[bs, N]: what the sampler gives at every node."""
    info = replace(make_sampling_batch_info(reqs, VOCAB_SIZE, "cpu"), vocab_mask=mask)
    nodes = expand_to_nodes(info, tree, make_early_bans(reqs, VOCAB_SIZE, "cpu"))
    logits = target.logits([text for b, req in enumerate(reqs) for text in node_texts(req, tree, b)])
    positions = tree.positions(torch.tensor([len(req.all_ids) - 1 for req in reqs]))
    return sampler.sample(logits, nodes, positions).next_token_ids.view_as(tree.token_ids)


def decode_plainly(
    target: ToyTarget,
    sampler: Sampler,
    reqs: Sequence[Req],
    num_tokens: int,
    mask: torch.Tensor | None = None,
) -> None:
    """Appends to each request's output."""
    for _ in range(num_tokens):
        info = replace(make_sampling_batch_info(reqs, VOCAB_SIZE, "cpu"), vocab_mask=mask)
        positions = torch.tensor([len(req.all_ids) - 1 for req in reqs])
        ids = sampler.sample(target.logits([req.all_ids for req in reqs]), info, positions).next_token_ids
        for req, token_id in zip(reqs, ids.tolist()):
            req.output_ids.append(token_id)


def decode_by_trees(
    target: ToyTarget,
    ops: DraftTreeOps,
    sampler: Sampler,
    reqs: Sequence[Req],
    drafter: Drafter,
    num_rounds: int,
    mask: torch.Tensor | None = None,
) -> list[int]:
    """Appends to each request's output -> the number of drafts accepted, for each round and request."""
    num_accepted = []
    for _ in range(num_rounds):
        tree = drafter(ops, reqs)
        accepted = ops.accept(tree, sample_nodes(target, sampler, reqs, tree, mask))
        for b, req in enumerate(reqs):
            num = int(accepted.num_accepted[b])
            req.output_ids += accepted.token_ids[b, : num + 1].tolist()
            num_accepted.append(num)
    return num_accepted


def model_drafter(
    model: ToyTarget, top_k: int, num_steps: int, num_draft_tokens: int, flip: bool = False
) -> Drafter:
    """Drafts what `model` finds likeliest; flip: least likely."""

    def draft(ops: DraftTreeOps, reqs: Sequence[Req]) -> DraftTree:
        sign = -1.0 if flip else 1.0
        texts = [list(req.all_ids) for req in reqs]
        steps = [ops.first_beams(ops.top_tokens(sign * model.logits(texts), top_k))]
        ways = [[[]] for _ in reqs]
        for _ in range(num_steps - 1):
            beams = steps[-1]
            ways = [
                [
                    [*ways[b][parent], token_id]
                    for parent, token_id in zip(beams.parents[b].tolist(), beams.token_ids[b].tolist())
                ]
                for b in range(len(reqs))
            ]
            rows = [texts[b] + way for b in range(len(reqs)) for way in ways[b]]
            top = ops.top_tokens(sign * model.logits(rows), top_k)
            shape = (len(reqs), top_k, top_k)
            steps.append(ops.next_beams(beams, TopTokens(top.probs.view(shape), top.token_ids.view(shape))))
        return ops.build(torch.tensor([text[-1] for text in texts]), steps, num_draft_tokens)

    return draft


def random_drafter(num_draft_tokens: int, seed: int) -> Drafter:
    """Trees of random shapes and tokens, with padding."""
    generator = torch.Generator().manual_seed(seed)

    def draft(ops: DraftTreeOps, reqs: Sequence[Req]) -> DraftTree:
        shape = (len(reqs), num_draft_tokens)
        ids = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        ids[:, 0] = torch.tensor([req.all_ids[-1] for req in reqs])
        above = torch.randint(0, 1000, shape, generator=generator)
        parents = above % torch.arange(num_draft_tokens).clamp(min=1)
        num_nodes = torch.randint(1, num_draft_tokens + 1, shape[:1], generator=generator)
        return ops.from_parents(ids, parents, num_nodes)

    return draft


def prophet(texts: Sequence[Sequence[int]], length: int) -> Drafter:
    """Chains of what the whole texts (prompt and output) go on with."""

    def draft(ops: DraftTreeOps, reqs: Sequence[Req]) -> DraftTree:
        ids = torch.zeros(len(reqs), length + 1, dtype=torch.int64)
        sizes = []
        for b, req in enumerate(reqs):
            start = len(req.all_ids) - 1
            ahead = list(texts[b][start : start + length + 1])
            ids[b, : len(ahead)] = torch.tensor(ahead)
            sizes.append(len(ahead))
        parents = (torch.arange(length + 1) - 1).repeat(len(reqs), 1)
        return ops.from_parents(ids, parents, torch.tensor(sizes))

    return draft
