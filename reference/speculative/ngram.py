"""N-gram drafting, without a model: the tokens that followed the same tokens earlier, in any recent request
of the same namespace."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from diptych.shared.config import EngineConfig, draft_shape
from diptych.shared.interfaces import DrafterParts
from diptych.shared.interfaces import drafter as interface
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req

MAX_MATCH_LEN = 8  # longest suffix to match; longer matches add little
MAX_NODES = 1_000_000  # of all tries: some hundred megabytes

Edge = tuple[float, int, int, "TrieNode", int]
"""A candidate node: minus its probability, a tie-break, a token id, its run, the parent node."""


@dataclass(slots=True, eq=False)
class TrieNode:
    """A node of the trie, for the tokens on its path."""

    count: int = 0  # how often these tokens were seen in a row
    children: dict[int, TrieNode] = field(default_factory=dict)


class NgramTrie:
    """A trie of all seen runs of at most `max_len` tokens, with their counts."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.root = TrieNode()
        self.num_nodes = 1

    # --8<-- [start:ngram-append]
    def append(self, token_id: int, open_runs: list[TrieNode]) -> list[TrieNode]:
        """Append a token to a sequence. open_runs: the runs that end at the previous
        token, shortest first. Returns the runs that end at this token."""
        runs: list[TrieNode] = []
        for run in (self.root, *open_runs[: self.max_len - 1]):
            child = run.children.get(token_id)
            if child is None:
                child = run.children[token_id] = TrieNode()
                self.num_nodes += 1
            child.count += 1
            runs.append(child)
        return runs

    # --8<-- [end:ngram-append]

    def find(self, token_ids: Sequence[int]) -> TrieNode | None:
        node: TrieNode | None = self.root
        for token_id in token_ids:
            node = node.children.get(token_id) if node is not None else None
        return node


@dataclass
class _Sequence:
    """The number of a request's tokens in the trie, and its open runs."""

    num_tokens: int = 0
    open_runs: list[TrieNode] = field(default_factory=list)


class NgramDrafter(interface.Drafter):
    """Drafts from tries of all tokens of recent requests, prompts included: a trie for each namespace
    (`req.extra_key`), or for each request if they do not share. When the tries have `max_nodes` nodes, they
    are rebuilt from the live requests. (A request that is retracted and readmitted counts twice.)"""

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        self.device = parts.device
        self.draft_tree = parts.component("draft_tree")()
        self.num_token_ids = parts.num_token_ids
        self.is_private = config.speculative_ngram_private
        self.max_len = MAX_MATCH_LEN + draft_shape(config).num_steps
        self.max_nodes = MAX_NODES
        self.tries: dict[Hashable, NgramTrie] = {}
        self.sequences: dict[str, _Sequence] = {}

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        pass  # tokens are read when they are needed

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        if self.num_nodes > self.max_nodes:
            self.tries.clear()
            self.sequences.clear()
        for req in batch.reqs:
            self._read(req)
        num_padded = shape.num_draft_tokens
        token_ids, parents, num_nodes = [], [], []
        for req in batch.reqs:
            ids, above = continue_tokens(self._trie_of(req), req.all_ids[-MAX_MATCH_LEN:], shape)
            padding = [0] * (num_padded - len(ids))
            token_ids.append(ids + padding)
            parents.append(above + padding)
            num_nodes.append(len(ids))
        tensors = (torch.tensor(values, device=self.device) for values in (token_ids, parents, num_nodes))
        tree: DraftTree = self.draft_tree.from_parents(*tensors)
        return tree

    def forget(self, req: Req) -> None:
        if req.rid in self.sequences:
            self._read(req)  # its last tokens
            del self.sequences[req.rid]
        if self.is_private:
            self.tries.pop(req.rid, None)

    @property
    def num_nodes(self) -> int:
        return sum(trie.num_nodes for trie in self.tries.values())

    def _trie_of(self, req: Req) -> NgramTrie:
        key = req.rid if self.is_private else req.extra_key
        if key not in self.tries:
            self.tries[key] = NgramTrie(self.max_len)
        return self.tries[key]

    def _read(self, req: Req) -> None:
        sequence, trie = self.sequences.setdefault(req.rid, _Sequence()), self._trie_of(req)
        for token_id in req.all_ids[sequence.num_tokens :]:
            if token_id < self.num_token_ids:
                sequence.open_runs = trie.append(token_id, sequence.open_runs)
            else:
                sequence.open_runs = []  # a prompt may have ids that cannot be drafted
        sequence.num_tokens = req.num_tokens


def continue_tokens(trie: NgramTrie, tokens: list[int], shape: DraftShape) -> tuple[list[int], list[int]]:
    """Ids and parents of a tree below the last of `tokens`, which is node 0: the likeliest continuations of
    the longest suffix of `tokens` that was seen before and, while there is room, of shorter suffixes."""
    ids, parents, depths = [tokens[-1]], [0], [0]
    children: list[dict[int, int]] = [{}]  # of each node: token id -> node
    ties = count()
    for match_len in range(len(tokens), 0, -1):
        match = trie.find(tokens[-match_len:])
        # The likeliest after the match comes first.
        # --8<-- [start:ngram-draft]
        edges = _edges(match, 1.0, 0, ties) if match is not None else []
        heapq.heapify(edges)
        while edges and len(ids) < shape.num_draft_tokens:
            score, _, token_id, run, parent = heapq.heappop(edges)
            node = children[parent].get(token_id)
            if node is None:
                if len(children[parent]) == shape.top_k or depths[parent] == shape.num_steps:
                    continue
                node = children[parent][token_id] = len(ids)
                ids.append(token_id)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                children.append({})
            for edge in _edges(run, -score, node, ties):
                heapq.heappush(edges, edge)
        # --8<-- [end:ngram-draft]
    return ids, parents


def _edges(run: TrieNode, probability: float, parent: int, ties: Iterator[int]) -> list[Edge]:
    """The continuations of a run, the most frequent first, each with its share of `probability`."""
    followers = sorted(run.children.items(), key=lambda item: (-item[1].count, item[0]))
    total = sum(child.count for _, child in followers)
    return [
        (-probability * child.count / total, next(ties), token_id, child, parent)
        for token_id, child in followers
    ]
