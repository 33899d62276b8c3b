"""Planted bugs in the radix cache's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diptych.reference.radix_cache import RadixCache, TreeNode
from diptych.shared.interfaces.prefix_cache import InsertResult, MatchResult, RadixKey
from tests.conformance.mutants.mutant import bugs_in, mutant_of


@mutant_of("radix_cache")
class SplitLosesTheLock(RadixCache):
    """The upper half of a locked node can be evicted from above its lower half's users."""

    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        upper = super()._split(child, upper_len)
        upper.lock_ref = 0
        return upper


@mutant_of("radix_cache")
class SplitKeepsTheUpperHalf(RadixCache):
    """The split node's object becomes the upper half: its holders lose the lower half."""

    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        upper = super()._split(child, upper_len)
        for name in ("node_id", "last_access_time"):
            mine, other = getattr(upper, name), getattr(child, name)
            setattr(upper, name, other)
            setattr(child, name, mine)
        return upper


@mutant_of("radix_cache")
class SplitRefreshesTheRemainder(RadixCache):
    """What a match did not reach looks as recently used as what it reached."""

    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        child.last_access_time = self._time
        return super()._split(child, upper_len)


@mutant_of("radix_cache")
class SplitIsNew(RadixCache):
    """The upper half of a split counts as created by it."""

    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        upper = super()._split(child, upper_len)
        upper.creation_time = self._time
        return upper


@mutant_of("radix_cache")
class SplitCountsTwice(RadixCache):
    """The upper half of a split is added to the evictable tokens once more."""

    def _split(self, child: TreeNode, upper_len: int) -> TreeNode:
        if child.lock_ref > 0:
            self._evictable_size += upper_len
        return super()._split(child, upper_len)


@mutant_of("radix_cache")
class LocksMoreThanMatched(RadixCache):
    """A match ends inside a node and gives the whole of it to lock."""

    def match_prefix(self, key: RadixKey) -> MatchResult:
        indices, node = super().match_prefix(key)
        if len(node.children) == 1:
            (node,) = node.children.values()
        return MatchResult(indices, node)


@mutant_of("radix_cache")
class MatchesPartOfAPage(RadixCache):
    """Keys that part within a page are split there."""

    def _matched_len(self, entries, start: int, key) -> int:
        n = super()._matched_len(entries, start, key)
        while n < min(len(entries) - start, len(key)) and entries[start + n] == key[n]:
            n += 1
        return n


@mutant_of("radix_cache")
class MatchesAShortKey(RadixCache):
    """A key shorter than a page takes the first page that begins like it."""

    def match_prefix(self, key: RadixKey) -> MatchResult:
        if 0 < len(key) < self.page_size:
            for child in self.root.children.values():
                if child.key[: len(key)] == key.token_ids:
                    return MatchResult(child.value[: len(key)].clone(), child)
        return super().match_prefix(key)


@mutant_of("radix_cache")
class NamespacesShare(RadixCache):
    """Children are found by their tokens alone."""

    def _child_key(self, entries, start: int, extra_key: str | None):
        return super()._child_key(entries, start, None)


@mutant_of("radix_cache")
class ComparesTheFirstPageOnly(RadixCache):
    """A child found by its first page is taken to match as far as the key goes."""

    def _matched_len(self, entries, start: int, key) -> int:
        n = min(len(entries) - start, len(key))
        return n - n % self.page_size


@mutant_of("radix_cache")
class BigramsAsTokens(RadixCache):
    """The token after a bigram cache's last one is not compared."""

    def _whole_pages(self, key: RadixKey):
        return super()._whole_pages(RadixKey(key.token_ids[: len(key)], key.extra_key))


@mutant_of("radix_cache")
class ReplacesOldSlots(RadixCache):
    """Inserting what is there gives the node the caller's slots."""

    def insert(self, key: RadixKey, value: torch.Tensor, priority: int = 0) -> InsertResult:
        result = super().insert(key, value, priority)
        node = result.last_node
        if 0 < result.prefix_len == len(node.value):
            node.value = value[: len(node.value)].clone()
        return result


@mutant_of("radix_cache")
class TouchesTheLastNodeOnly(RadixCache):
    """A match refreshes the node in which it ends, and none above: parents look old."""

    def _walk(self, key: RadixKey):
        before = {node.node_id: node.hit_count for node in self._all_nodes()}
        node, matched_len = super()._walk(key)
        for ancestor in self._path(node):
            if ancestor is not node and ancestor.node_id in before:
                ancestor.hit_count = before[ancestor.node_id]
        return node, matched_len


def with_order(policy: str, order: Callable[[TreeNode], tuple[int, ...]]) -> type[RadixCache]:
    """A cache whose `policy` evicts in another order."""

    class Reordered(RadixCache):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if options.get("eviction_policy") == policy:
                self.eviction_order = order

    return Reordered


@mutant_of("radix_cache")
class MruIsLru(with_order("mru", lambda node: (node.last_access_time,))):
    """mru evicts what was not used for the longest time."""


@mutant_of("radix_cache")
class SlruProtectsAfterOneHit(with_order("slru", lambda node: (node.hit_count > 0, node.last_access_time))):
    """slru keeps a node longer that was hit once."""


@mutant_of("radix_cache")
class SaysWhatWasAsked(RadixCache):
    """evict gives the number that it was asked for."""

    def evict(self, num_tokens: int) -> int:
        return min(super().evict(num_tokens), max(num_tokens, 0))


@mutant_of("radix_cache")
class ForgetsToFree(RadixCache):
    """Evicted slots do not go back to the allocator."""

    def _remove_leaf(self, leaf: TreeNode) -> None:
        allocator, self.allocator = self.allocator, None
        super()._remove_leaf(leaf)
        self.allocator = allocator


@mutant_of("radix_cache")
class DiscardsNothing(RadixCache):
    """What proved to be bad goes on being found."""

    def discard(self, key: RadixKey, start: int) -> None:
        self.match_prefix(key)


@mutant_of("radix_cache")
class DiscardsFromTheBeginning(RadixCache):
    """What was there before is discarded too."""

    def discard(self, key: RadixKey, start: int) -> None:
        super().discard(key, 0)


@mutant_of("radix_cache")
class DiscardsTheLastNodeOnly(RadixCache):
    """Of a path only its last node is discarded, and if it has children, nothing."""

    def discard(self, key: RadixKey, start: int) -> None:
        node = self.match_prefix(key).last_node
        begins_at = sum(len(above.key) for above in self._path(node)) - len(node.key)
        if begins_at >= start and not node.children and node.lock_ref == 0 and node is not self.root:
            self._remove_leaf(node)


@mutant_of("radix_cache")
class NegativeLocks(RadixCache):
    """A lock given up twice goes below zero, or is ignored."""

    def dec_lock_ref(self, node: TreeNode) -> None:
        if node.lock_ref > 0:
            super().dec_lock_ref(node)


@mutant_of("radix_cache")
class ResetFreesSlots(RadixCache):
    """reset gives slots back that its caller's own reset of the pools frees as well."""

    def reset(self) -> None:
        if self.allocator is not None and hasattr(self, "root"):
            for node in self._all_nodes():
                self.allocator.free(node.value)
        super().reset()


bug = bugs_in("radix_cache", "reference.radix_cache:RadixCache", folder="reference.")
# fmt: off
bug("SaysItIsDisabled", "The scheduler takes it for a cache that finds nothing.",
    ("radix_cache", "        self.page_size = page_size\n",
     "        self.page_size, self.disable = page_size, True\n"))
bug("NothingIsOfAnotherType", "An empty match is a tensor of floats.",
    ("radix_cache", "MatchResult(self._path_slots(node), node)",
     "MatchResult(self._path_slots(node) if node.parent else torch.empty(0), node)"))
bug("RefusesSurplusSlots", "There must be a slot for each token and no more.",
    ("radix_cache", "assert len(value) >= len(entries)", "assert len(value) == len(entries)"))
bug("EvictsAtLeastOne", "A call that asks for nothing evicts a leaf.",
    ("radix_cache", "if num_tokens <= 0:\n            return 0\n", "pass\n"),
    ("radix_cache", "while leaves and num_evicted < num_tokens:",
     "while leaves and (not num_evicted or num_evicted < num_tokens):"))
bug("PagesOfNothing", "A page size of 0 is accepted.",
    ("radix_cache", "if page_size < 1:", "if page_size < 0:"))
bug("ASplitGivesTheLowerHalf", "A match inside a node ends below it.",
    ("radix_cache", "child = self._split(child, matched_len)", "self._split(child, matched_len)"))
bug("KeepsTheFirstNodeToDiscard", "What begins just where discarding begins is kept.",
    ("radix_cache", "if end < start or", "if end <= start or"))
bug("LocksEndAtTheSecondNode", "A lock leaves out the first node of a longer path.",
    ("radix_cache", "        for ancestor in self._path(node):\n            if ancestor.lock_ref == 0:\n"
     "                self._evictable_size -=",
     "        for ancestor in list(self._path(node))[:-1] or self._path(node):\n"
     "            if ancestor.lock_ref == 0:\n"
     "                self._evictable_size -="),
    ("radix_cache", "assert ancestor.lock_ref > 0", "assert ancestor.lock_ref >= 0"))
