"""Each node's row of sampling parameters is that of a request whose output goes up to the node."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.speculative import node_sampler
from diptych.reference.speculative.draft_tree import DraftTreeOps
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.speculation.node_sampling import expand_to_nodes, make_early_bans
from diptych.shared.tools.conformance.oracles.sampling_oracle import ADJUSTED, KINDS, Ask
from diptych.shared.types import DraftTree, Req, SamplingParams
from tests.speculative.toy import VOCAB_SIZE, node_texts, random_drafter

TEXT = {"prompt": (3, 8, 8, 5), "output": (4, 4, 4, 0, 3), "eos": (8,)}
MINIMA = tuple(Ask(f"at least {n}", min_new_tokens=n, **TEXT) for n in (5, 6, 7, 8, 100))
MIXED = (*KINDS, *ADJUSTED, *MINIMA)


def begun(asks: tuple[Ask, ...]) -> list[Req]:
    reqs = [ask.req(seed=i) for i, ask in enumerate(asks)]
    return [replace(req, output_ids=req.output_ids or [6]) for req in reqs]


def check(reqs: list[Req], tree: DraftTree) -> None:
    info = make_sampling_batch_info(reqs, VOCAB_SIZE, "cpu")
    found = expand_to_nodes(info, tree, make_early_bans(reqs, VOCAB_SIZE, "cpu"))
    at_nodes = [
        replace(req, output_ids=text[len(req.origin_input_ids) :])
        for b, req in enumerate(reqs)
        for text in node_texts(req, tree, b)
    ]
    expected = make_sampling_batch_info(at_nodes, VOCAB_SIZE, "cpu")
    is_node = (torch.arange(tree.num_draft_tokens) < tree.num_nodes[:, None]).flatten()  # not padding
    needs_penalty = torch.tensor([req.sampling_params.needs_penalty for req in at_nodes])
    for field in fields(info):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "banned":  # None where nothing is banned any more
            nothing = torch.zeros(len(at_nodes), VOCAB_SIZE, dtype=torch.bool)
            ours, theirs = (nothing if value is None else value for value in (ours, theirs))
        if isinstance(theirs, torch.Tensor):
            # Rows without penalties are not counted in a plain batch, and not read.
            rows = is_node & needs_penalty if field.name == "output_counts" else is_node
            assert torch.equal(ours[rows], theirs[rows]), field.name
            assert ours.dtype == theirs.dtype, field.name
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_batch(seed: int) -> None:
    reqs = begun(MIXED)
    check(reqs, random_drafter(9, seed)(DraftTreeOps(), reqs))


@pytest.mark.parametrize("ask", MIXED, ids=lambda ask: ask.name)
def test_a_request_alone(ask: Ask) -> None:
    reqs = begun((ask, ask))
    check(reqs, random_drafter(12, 5)(DraftTreeOps(), reqs))


def test_end_tokens_are_allowed_from_the_right_depth_on() -> None:
    reqs = begun(MINIMA[:4])  # at least 5, 6, 7, 8; five are written
    chain = torch.arange(5).repeat(4, 1)
    tree = DraftTreeOps().from_parents(chain, chain - 1, torch.full((4,), 5))
    info = make_sampling_batch_info(reqs, VOCAB_SIZE, "cpu")
    found = expand_to_nodes(info, tree, make_early_bans(reqs, VOCAB_SIZE, "cpu"))
    assert found.banned is not None
    assert found.banned[:, 8].view(4, 5).tolist() == [[depth < num for depth in range(5)] for num in range(4)]
    assert int(found.banned.sum()) == 0 + 1 + 2 + 3


@pytest.mark.parametrize("params", [{"allowed_token_ids": (1, 2)}, {"bad_word_ids": ((8,),)}])
def test_what_is_banned_for_ever_is_no_early_ban(params: dict[str, Any]) -> None:
    reqs = begun(MINIMA[:1])
    reqs[0].sampling_params = replace(reqs[0].sampling_params, **params)
    assert make_early_bans(reqs, VOCAB_SIZE, "cpu") is None


def test_bans_that_are_not_early_stay() -> None:
    ask = Ask("both", min_new_tokens=6, logit_bias=((8, -torch.inf), (2, -torch.inf)), **TEXT)
    reqs = begun((ask,))
    assert make_early_bans(reqs, VOCAB_SIZE, "cpu") is None
    check(reqs, random_drafter(9, 1)(DraftTreeOps(), reqs))


def test_no_request_is_early() -> None:
    assert make_early_bans(begun((MINIMA[0],)), VOCAB_SIZE, "cpu") is None
    ignoring = [replace_params(req) for req in begun((MINIMA[4],))]
    assert make_early_bans(ignoring, VOCAB_SIZE, "cpu") is None
    check(ignoring, random_drafter(9, 2)(DraftTreeOps(), ignoring))


def test_no_request_asks_for_more_than_there_will_be() -> None:
    """min_new_tokens is any integer, and no one else's request may end for it."""
    params = SamplingParams(min_new_tokens=10**20, max_new_tokens=10**20)
    [req] = begun((MINIMA[4],))
    bans = make_early_bans([replace(req, sampling_params=params, max_new_tokens=40)], VOCAB_SIZE, "cpu")
    assert bans is not None
    assert bans.num_left.tolist() == [40 - len(TEXT["output"])]


def replace_params(req: Req) -> Req:
    return replace(req, sampling_params=replace(req.sampling_params, ignore_eos=True))


def test_masks_are_repeated() -> None:
    reqs = begun((KINDS[0], KINDS[2]))
    mask = torch.tensor([[5], [6]], dtype=torch.int32)
    info = replace(make_sampling_batch_info(reqs, VOCAB_SIZE, "cpu"), vocab_mask=mask)
    found = expand_to_nodes(info, random_drafter(3, 2)(DraftTreeOps(), reqs))
    assert found.vocab_mask is not None
    assert found.vocab_mask.tolist() == [[5]] * 3 + [[6]] * 3


@pytest.mark.parametrize(
    ("counts", "bans", "num_made"), [(None, None, 1), (torch.zeros(1), None, 2), (None, object(), 2)]
)
def test_the_info_of_nodes_is_kept_while_nothing_depends_on_outputs(
    counts: Any, bans: Any, num_made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(node_sampler, "expand_to_nodes", lambda *_: made.append(object()) or made[-1])
    sampler = node_sampler.NodeSampler(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    info: Any = SimpleNamespace(output_counts=counts)
    small, large = (SimpleNamespace(num_draft_tokens=n) for n in (4, 5))
    found = [sampler._info_of_nodes(info, small, bans) for _ in range(2)]  # type: ignore[arg-type]
    assert len(made) == num_made
    assert found == [made[0], made[-1]]
    sampler._info_of_nodes(info, large, bans)  # type: ignore[arg-type]
    assert len(made) == num_made + 1
