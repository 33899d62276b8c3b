"""The trie of what was seen, and the trees that grow from it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from diptych.reference.speculative.ngram import NgramDrafter, NgramTrie, TrieNode, continue_tokens
from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.types import DraftBatch, DraftShape, Req, SamplingParams

CHAIN = DraftShape(5, 1, 6)


def trie_of(*sequences: list[int], max_len: int = 8) -> NgramTrie:
    trie = NgramTrie(max_len)
    for tokens in sequences:
        runs: list[TrieNode] = []
        for token in tokens:
            runs = trie.append(token, runs)
    return trie


def test_every_run_is_counted() -> None:
    trie = trie_of([1, 2, 1, 2, 3])
    for run, num in (([1], 2), ([1, 2], 2), ([2, 1], 1), ([1, 2, 1, 2, 3], 1), ([2, 3], 1)):
        node = trie.find(run)
        assert node is not None
        assert node.count == num
    assert trie.find([3, 1]) is None


def test_runs_are_no_longer_than_they_may_be() -> None:
    trie = trie_of([1, 2, 3, 4], max_len=3)
    assert trie.find([2, 3, 4]) is not None
    assert trie.find([1, 2, 3, 4]) is None


def test_what_followed_is_drafted() -> None:
    ids, parents = continue_tokens(trie_of([1, 2, 3, 4, 5, 1, 2]), [1, 2], CHAIN)
    assert ids == [2, 3, 4, 5, 1, 2]
    assert parents == [0, 0, 1, 2, 3, 4]


def test_the_longest_match_goes_first() -> None:
    """After 2 comes 9 twice, but after 1, 2 comes 3."""
    trie = trie_of([1, 2, 3, 0, 2, 9, 0, 2, 9])
    assert continue_tokens(trie, [7, 1, 2], DraftShape(1, 1, 2))[0] == [2, 3]
    ids, parents = continue_tokens(trie, [7, 1, 2], DraftShape(1, 2, 3))
    assert (ids, parents) == ([2, 3, 9], [0, 0, 0])


def test_the_frequent_goes_before_the_rare_and_widths_and_depths_hold() -> None:
    trie = trie_of([1, 5, 0], [1, 6, 0], [1, 6, 8], [1, 7, 0])
    ids, parents = continue_tokens(trie, [1], DraftShape(2, 2, 8))
    assert ids[1] == 6
    assert [ids[n] for n in range(1, len(ids)) if parents[n] == 0] == [6, 5]
    assert all(parents[parent] == 0 for parent in parents)  # no node is deeper than 2


def drafter_and_batch(prompt: list[int]) -> tuple[NgramDrafter, DraftBatch]:
    config = EngineConfig(model="tiny-dense", speculative="ngram", device="cpu")
    tree_ops = registry.load("draft_tree", "reference")
    parts = SimpleNamespace(device=torch.device("cpu"), num_token_ids=100, component=lambda name: tree_ops)
    req = Req("r", prompt, SamplingParams(max_new_tokens=5), 0, frozenset())
    slots, seq_len = torch.zeros(1, 5, dtype=torch.int64), len(prompt) - 1
    batch = DraftBatch(
        [req], torch.tensor(prompt[-1:]), torch.tensor([0]), torch.tensor([seq_len]), (seq_len,), slots
    )
    return NgramDrafter(config, parts), batch


def test_a_full_trie_is_made_anew_from_the_live_requests() -> None:
    drafter, batch = drafter_and_batch([1, 2, 3, 1, 2])
    ended = Req("ended", [1, 2, 9, 1, 2, 9, 1, 2, 9], SamplingParams(max_new_tokens=5), 0, frozenset())
    drafter._read(ended)
    drafter.forget(ended)
    assert drafter.draft(batch, DraftShape(1, 1, 2)).token_ids.tolist() == [[2, 9]]
    num_nodes, drafter.max_nodes = drafter.num_nodes, drafter.num_nodes - 1
    assert drafter.draft(batch, DraftShape(1, 1, 2)).token_ids.tolist() == [[2, 3]]
    assert drafter.num_nodes < num_nodes


def test_padding_ids_of_a_prompt_are_never_drafted() -> None:
    """The head has more rows than there are tokens, and a prompt may hold the ids of such rows."""
    drafter, batch = drafter_and_batch([1, 2, 100, 150, 3, 1, 2, 100, 150, 3, 1, 2])
    (req,) = batch.reqs
    tree = drafter.draft(batch, DraftShape(3, 2, 6))
    assert int(tree.token_ids.max()) < 100
    assert int(tree.num_nodes) == 1  # 2 was followed by a padding id only
    req.origin_input_ids += [7, 1, 2]
    tree = drafter.draft(batch, DraftShape(3, 2, 6))
    assert 7 in tree.token_ids.tolist()[0]


def test_nothing_seen_is_nothing_drafted() -> None:
    assert continue_tokens(trie_of([1, 2]), [3], CHAIN) == ([3], [0])
