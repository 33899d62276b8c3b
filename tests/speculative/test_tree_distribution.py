"""Verification keeps the target's distribution, and accepts as much as the rejection walk, which nothing
beats: chi-square tests with fixed seeds, against exact probabilities."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import pytest
import torch

from diptych.reference.sampler import Sampler
from diptych.reference.speculative.draft_tree import DraftTreeOps, _accepted
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.speculation.node_sampling import expand_to_nodes, make_early_bans
from diptych.shared.tools.conformance.oracles.chi_square import ALPHA, p_value
from diptych.shared.tools.conformance.oracles.sampling_oracle import ADJUSTED, Ask, exact_distribution
from diptych.shared.types import Accepted, DraftTree, Req
from tests.speculative.toy import VOCAB_SIZE, Drafter, ToyTarget, model_drafter, node_texts, random_drafter

NUM_DRAWS = 10_000
MIN_DRAWS = 1_000
"""Nodes that fewer draws reach are not looked at."""
TARGET = ToyTarget()
DRAFTERS = {
    "the target": model_drafter(TARGET, 2, 3, 7),
    "good": model_drafter(ToyTarget(blur=0.6), 3, 2, 6),
    "useless": model_drafter(TARGET, 2, 2, 5, flip=True),
    "dice": random_drafter(8, seed=5),
}
ASKS = (
    Ask("plain"),
    Ask("cold", temperature=0.5),
    Ask("hot", temperature=2.0),
    Ask("top-k", top_k=3),
    Ask("top-p", top_p=0.7),
    Ask("min-p", min_p=0.2),
    *ADJUSTED,
)
MASK = 0b1011101101
"""Tokens 1, 4 and 8 are banned."""


def accept_by_rejection(
    tree: DraftTree, probs: torch.Tensor, coins: torch.Tensor, bonus_coins: torch.Tensor
) -> Accepted:
    """The usual rejection sampling, for comparison: it uses the target's distribution at every node, not a
    sample.

    probs [bs, N, V] sum to 1; coins [bs, N] and bonus_coins [bs] are uniform in [0, 1). At each node the coin
    selects a child with the child's probability, or none. Then the bonus token is drawn from the remaining
    distribution.
    """
    first_child, sibling = tree.next_token.tolist(), tree.next_sibling.tolist()
    drafts, target, coin = tree.token_ids.tolist(), probs.tolist(), coins.tolist()
    paths, tokens = [], []
    for b, bonus_coin in enumerate(bonus_coins.tolist()):
        path, ids = [0], []
        while True:
            node = path[-1]
            left, reached, child = list(target[b][node]), 0.0, first_child[b][node]
            while child >= 0:
                reached += left[drafts[b][child]]
                if coin[b][node] < reached:
                    break
                left[drafts[b][child]] = 0.0  # rejected, so it cannot be the bonus token either
                child = sibling[b][child]
            if child < 0:
                break
            path.append(child)
            ids.append(drafts[b][child])
        below = list(accumulate(left))
        ids.append(bisect_right(below, bonus_coin * below[-1]))
        paths.append(path)
        tokens.append(ids)
    return _accepted(paths, tokens, tree, tree.num_draft_tokens - 1)


@dataclass(frozen=True)
class Verified:
    """One tree, verified with many seeds."""

    tree: DraftTree  # of one request
    probs: list[list[float]]  # the target's exact distribution at each node
    accepted: Accepted


def begun(ask: Ask) -> Req:
    """Its newest token is the root."""
    req = ask.req()
    if not req.output_ids:
        req.output_ids.append(6)
    return req


def requests_at_nodes(req: Req, tree: DraftTree) -> list[Req]:
    """What the request would be, had each node been written."""
    prompt_len = len(req.origin_input_ids)
    outputs = [text[prompt_len:] for text in node_texts(req, tree, 0)]
    return [replace(req, output_ids=list(output)) for output in outputs]


def exact_probs(req: Req, tree: DraftTree, mask: int | None) -> list[list[float]]:
    logits = TARGET.logits(node_texts(req, tree, 0))
    if mask is not None:
        banned = [i for i in range(VOCAB_SIZE) if not mask >> i & 1]
        logits[:, banned] = -torch.inf
    return [exact_distribution(row, at) for row, at in zip(logits.tolist(), requests_at_nodes(req, tree))]


def repeated(tree: DraftTree, times: int) -> DraftTree:
    columns = {f.name: getattr(tree, f.name) for f in fields(tree)}
    return DraftTree(**{name: column.repeat_interleave(times, dim=0) for name, column in columns.items()})


def verify(ask: Ask, drafter: Drafter, mask: int | None = None) -> Verified:
    """By sampling at every node."""
    req, ops = begun(ask), DraftTreeOps()
    tree = drafter(ops, [req])
    many, n = repeated(tree, NUM_DRAWS), tree.num_draft_tokens
    info = make_sampling_batch_info([req], VOCAB_SIZE, "cpu")
    if mask is not None:
        info = replace(info, vocab_mask=torch.tensor([[mask]], dtype=torch.int32))
    nodes = expand_to_nodes(info, tree, make_early_bans([req], VOCAB_SIZE, "cpu"))
    rows = {f.name: getattr(nodes, f.name) for f in fields(nodes)}
    tensors = {name: value for name, value in rows.items() if isinstance(value, torch.Tensor)}
    tiled = {name: value.repeat(NUM_DRAWS, *[1] * (value.dim() - 1)) for name, value in tensors.items()}
    seeds = torch.arange(NUM_DRAWS).repeat_interleave(n)
    nodes = replace(nodes, **{**tiled, "seeds": seeds})
    logits = TARGET.logits(node_texts(req, tree, 0)).repeat(NUM_DRAWS, 1)
    positions = many.positions(torch.full((NUM_DRAWS,), len(req.all_ids) - 1))
    samples = Sampler().sample(logits, nodes, positions).next_token_ids.view(NUM_DRAWS, n)
    return Verified(tree, exact_probs(req, tree, mask), ops.accept(many, samples))


def verify_by_rejection(ask: Ask, drafter: Drafter) -> Verified:
    req = begun(ask)
    tree = drafter(DraftTreeOps(), [req])
    probs = exact_probs(req, tree, None)
    generator = torch.Generator().manual_seed(0)
    coins = torch.rand(NUM_DRAWS, tree.num_draft_tokens, generator=generator, dtype=torch.float64)
    bonus = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    many = torch.tensor(probs, dtype=torch.float64).expand(NUM_DRAWS, -1, -1)
    return Verified(tree, probs, accept_by_rejection(repeated(tree, NUM_DRAWS), many, coins, bonus))


def pooled_p_value(ids: torch.Tensor, expected: Sequence[float]) -> float:
    """Outcomes that are expected less than five times count as one."""
    probabilities = torch.tensor(expected, dtype=torch.float64)
    assert not (probabilities[ids] == 0).any(), "something came that cannot"
    is_rare = (probabilities * len(ids) < 5.0) & (probabilities > 0)
    rest = float(probabilities[is_rare].sum())
    if rest * len(ids) < 5.0:  # too little for a category of its own: look at the others
        ids, rest = ids[~is_rare[ids]], 0.0
    kept = torch.where(is_rare, 0.0, probabilities).tolist()
    merged = torch.where(is_rare[ids], len(kept), ids)
    total = sum(kept) + rest
    return p_value(merged, [p / total for p in [*kept, rest]])


def expect_distribution(found: Verified) -> None:
    """At each node that enough draws reached: what follows it is distributed as the target says. And as many
    drafts are accepted as the probabilities of the tree's tokens allow."""
    tree, accepted = found.tree, found.accepted
    num_looked_at = 0
    for depth in range(accepted.node_indices.shape[1]):
        for node in accepted.node_indices[:, depth].unique().tolist():
            ids = accepted.token_ids[accepted.node_indices[:, depth] == node, depth]
            if node >= 0 and len(ids) >= MIN_DRAWS:
                p = pooled_p_value(ids, found.probs[node])
                assert p > ALPHA, (node, p)
                num_looked_at += 1
    assert num_looked_at >= 1

    parents, ids = tree.parents[0].tolist(), tree.token_ids[0].tolist()
    reach, ends = [1.0], [0.0] * tree.num_draft_tokens
    for n in range(1, int(tree.num_nodes[0])):
        first = next(m for m in range(1, n + 1) if (parents[m], ids[m]) == (parents[n], ids[n]))
        reach.append(reach[parents[n]] * found.probs[parents[n]][ids[n]] if first == n else 0.0)
    for n, probability in enumerate(reach):
        depth = int(tree.depths[0, n])
        children = sum(reach[m] for m in range(1, len(reach)) if parents[m] == n)
        ends[depth] += max(probability - children, 0.0)
    p = pooled_p_value(accepted.num_accepted, [end if end > 1e-12 else 0.0 for end in ends])
    assert p > ALPHA, ("number of accepted drafts", p)


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.name.replace(" ", "-"))
@pytest.mark.parametrize("draft", DRAFTERS)
def test_distribution_is_the_targets(ask: Ask, draft: str) -> None:
    expect_distribution(verify(ask, DRAFTERS[draft]))


def test_distribution_under_a_mask() -> None:
    for drafter in DRAFTERS.values():
        expect_distribution(verify(Ask("all filters", 1.5, 6, 0.9, 0.02), drafter, MASK))


WITHOUT_EQUAL_SIBLINGS = ("useless", "good", "the target")  # siblings of dice may be equal


@pytest.mark.parametrize("ask", [ASKS[3], ASKS[0], ASKS[-1]], ids=lambda ask: ask.name.replace(" ", "-"))
@pytest.mark.parametrize("draft", WITHOUT_EQUAL_SIBLINGS)
def test_the_rejection_walk_is_no_better(ask: Ask, draft: str) -> None:
    """Both are held to the same exact probabilities, of tokens and of how many drafts are accepted."""
    sampled, walked = verify(ask, DRAFTERS[draft]), verify_by_rejection(ask, DRAFTERS[draft])
    expect_distribution(walked)
    means = [float(found.accepted.num_accepted.double().mean()) for found in (sampled, walked)]
    # Up to three are accepted: a mean's standard deviation is at most 1.5 / sqrt(10,000) = 0.015.
    assert abs(means[0] - means[1]) < 4 * 0.015 * 2**0.5
    if (draft, ask.name) == ("useless", "top-k"):
        assert means == [0.0, 0.0]


def test_the_test_finds_a_walk_that_is_wrong() -> None:
    """One time in ten: the best guess instead of the sample; a draft too many that counts as accepted."""
    found = verify(Ask("plain"), DRAFTERS["the target"])
    tokens = found.accepted.token_ids.clone()
    tokens[::10, 0] = found.tree.token_ids[0, 1]
    with pytest.raises(AssertionError):
        expect_distribution(replace(found, accepted=found.accepted._replace(token_ids=tokens)))
    num_accepted = found.accepted.num_accepted.clone()
    num_accepted[::10] += 1
    with pytest.raises(AssertionError):
        expect_distribution(replace(found, accepted=found.accepted._replace(num_accepted=num_accepted)))
