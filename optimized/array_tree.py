"""Nodes of a radix tree whose tokens are int64 arrays: 8 bytes a token, compared and cut as arrays.

A key stays a list. It is converted to arrays piece by piece, only as far as it matches an edge. n bigrams are
stored as n + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from diptych.shared.interfaces.prefix_cache import RadixKey
from diptych.shared.scheduling.pages import round_down_to_page

Array = npt.NDArray[np.int64]

COMPARE_LEN = 256
"""Tokens of the first piece of a key that is compared with an edge. Each further piece is twice as long."""


@dataclass(eq=False, slots=True)
class TreeNode:
    """An edge of the tree, and the subtree below it. Times are ticks of the cache's own counter."""

    node_id: int
    parent: TreeNode | None  # None: the root, or a node that was removed
    key: Array  # [num_slots] tokens; of bigrams [num_slots + 1]
    value: torch.Tensor  # [num_slots] int64, the slots
    num_slots: int  # whole pages; 0 for the root
    extra_key: Hashable
    is_bigram: bool
    creation_time: int
    last_access_time: int
    priority: int
    hit_count: int = 0
    lock_ref: int = 0
    is_queued: bool = False  # the eviction heap has an entry for the node, up to date or not
    children: dict[Hashable, TreeNode] = field(default_factory=dict)  # by the first page of their keys


def child_key(page: Sequence[int], extra_key: Hashable) -> Hashable:
    """`page`: the tokens of one page, for bigrams one more, so that keys of bigrams and of tokens differ."""
    return extra_key, *page


def child_key_of(node: TreeNode, page_size: int) -> Hashable:
    """The key by which a node's parent finds it."""
    return child_key(node.key[: page_size + node.is_bigram].tolist(), node.extra_key)


def matched_len(key: RadixKey, start: int, end: int, node: TreeNode, page_size: int) -> int:
    """Length of the common prefix of the key's entries [start, end) and `node`, in whole pages. The first
    page is known to match."""
    num_tokens = min(end - start, node.num_slots) + key.is_bigram
    n, piece_len = page_size + key.is_bigram, COMPARE_LEN
    while n < num_tokens:
        piece = as_array(key.token_ids[start + n : start + min(n + piece_len, num_tokens)])
        stored = node.key[n : n + len(piece)]
        if piece.tobytes() != stored.tobytes():  # faster than element by element, and mostly equal
            n += int((piece != stored).argmax())
            break
        n += len(piece)
        piece_len *= 2
    return round_down_to_page(n - key.is_bigram, page_size)


def part_of(node: TreeNode, start: int, end: int) -> tuple[Array, torch.Tensor]:
    """Key and value of the entries [start, end) of a node. They are views, or copies if a view would keep an
    array of twice their size alive. So the tree holds at most twice the memory that it needs, and the cost of
    copies is bounded by that of previous matches."""
    key, value = node.key[start : end + node.is_bigram], node.value[start:end]
    owner = node.key if node.key.base is None else node.key.base
    return (key.copy(), value.clone()) if 2 * (end - start) <= len(owner) else (key, value)


def as_array(tokens: list[int]) -> Array:
    """Convert a list to an array, twice as fast as numpy.array."""
    return np.fromiter(tokens, np.int64, len(tokens))
