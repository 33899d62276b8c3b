"""Planted bugs in the optimized radix cache: words of its source, changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diptych.optimized.array_tree as tree
import diptych.optimized.eviction_heap as heap
import diptych.optimized.radix_cache as original
from tests.conformance.mutants.mutant import mutant_of

SOURCE, HEAP, TREE = (Path(module.__file__).read_text("utf-8") for module in (original, heap, tree))


def changed(before: str, after: str) -> Any:
    """The optimized RadixCache of a source in which `before`, which is there once, became `after`."""
    assert SOURCE.count(before) == 1, f"{SOURCE.count(before)} times: {before!r}"
    names: dict[str, Any] = {"__name__": original.__name__}
    exec(SOURCE.replace(before, after), names)
    return names["RadixCache"]


def with_heap(before: str, after: str) -> Any:
    """The optimized RadixCache with a heap that is changed so."""
    assert HEAP.count(before) == 1, f"{HEAP.count(before)} times: {before!r}"
    names: dict[str, Any] = {"__name__": heap.__name__}
    exec(HEAP.replace(before, after), names)
    own: dict[str, Any] = {"__name__": original.__name__}
    exec(SOURCE, own)
    own["EvictionHeap"] = names["EvictionHeap"]
    return own["RadixCache"]


def with_tree(before: str, after: str) -> Any:
    """The optimized RadixCache over nodes that are changed so."""
    assert TREE.count(before) == 1, f"{TREE.count(before)} times: {before!r}"
    names: dict[str, Any] = {"__name__": tree.__name__}
    exec(TREE.replace(before, after), names)
    own: dict[str, Any] = {"__name__": original.__name__}
    exec(SOURCE, own)
    own |= {name: names[name] for name in ("TreeNode", "as_array", "matched_len", "part_of")}
    return own["RadixCache"]


# The heap


@mutant_of("radix_cache")
class EvictsByAStaleEntry(with_heap("order < (order_now := self.order(node))", "order is None")):
    """A leaf goes in the place that it had when its entry was made, however often it was used since."""


@mutant_of("radix_cache")
class HeapIgnoresLocks(with_heap("not node.children and node.lock_ref == 0 and", "not node.children and")):
    """A leaf that was locked after its entry was made is taken."""


@mutant_of("radix_cache")
class HeapIgnoresChildren(
    with_heap("not node.children and node.lock_ref == 0 and", "node.lock_ref == 0 and")
):
    """A node that got children after its entry was made is taken."""


@mutant_of("radix_cache")
class UnlockedLeavesAreForgotten(changed("self.heap.add(node)  # its ancestors have children", "pass")):
    """A leaf whose entry was dropped while it was locked never gets another one."""


@mutant_of("radix_cache")
class DroppedEntriesCountAsThere(with_heap("node.is_queued = False  # until", "pass  # until")):
    """A leaf whose entry was dropped is thought to have it still."""


@mutant_of("radix_cache")
class ParentsAreNotQueued(changed("num_slots\n            self.heap.add(parent)", "num_slots")):
    """Parents that become leaves get no entry."""


@mutant_of("radix_cache")
class SplitTakesTheEntry(
    changed("upper.lock_ref = child.lock_ref", "upper.lock_ref, upper.is_queued = child.lock_ref, True")
):
    """The upper half of a split counts as being in the heap, where only the lower one is."""


@mutant_of("radix_cache")
class NewLeavesAreForgotten(changed("        self.heap.add(leaf)\n", "")):
    """A leaf gets its entry with its first unlock only."""


@mutant_of("radix_cache")
class EvictsWhatWasDiscarded(with_heap("node.parent is not None", "(node.parent or node.node_id)")):
    """A leaf that was discarded still has its entry, and is taken for one of the tree."""


@mutant_of("radix_cache")
class DiscardingLeavesNoLeaf(
    changed("            self.heap.add(parent)\n            self._free", "            self._free")
):
    """A parent that becomes a leaf because its children are discarded gets no entry."""


@mutant_of("radix_cache")
class FreesTheLastLeafOnly(changed("free(torch.cat(values))", "free(values[-1])")):
    """Of the leaves of one call the slots of one come back."""


@mutant_of("radix_cache")
class MruEntriesAreNotRenewed(with_heap("if self.falls_with_use and node.is_queued:", "if False:")):
    """Under mru a leaf that is used keeps the place of an earlier use."""


# Splits and sizes


@mutant_of("radix_cache")
class SplitKeepsTheLength(changed("        child.num_slots -= upper_len\n", "")):
    """The lower half of a split counts as long as the whole."""


@mutant_of("radix_cache")
class LowerHalfReadsTheUpperSlots(with_tree("node.value[start:end]", "node.value[: end - start]")):
    """Both halves of a split begin with the same slot."""


@mutant_of("radix_cache")
class EvictedSizeStays(changed("        self._evictable_size -= leaf.num_slots\n", "")):
    """Evicted tokens go on counting as evictable."""


@mutant_of("radix_cache")
class UnlockedSizeStays(changed("self._protected_size -= ancestor.num_slots", "pass")):
    """Unlocked tokens go on counting as protected."""


# Comparing


@mutant_of("radix_cache")
class MatchEndsWithinAPage(
    with_tree("return round_down_to_page(n - key.is_bigram, page_size)", "return n - key.is_bigram")
):
    """Edges are cut where keys part, within a page or not."""


@mutant_of("radix_cache")
class MatchesPastTheEnd(with_tree("n += len(piece)", "n += piece_len")):
    """The last piece of a comparison counts as long as a whole one."""


@mutant_of("radix_cache")
class MissesTheFirstDifference(
    with_tree("if piece.tobytes() != stored.tobytes():", "if piece[1:].tobytes() != stored[1:].tobytes():")
):
    """A piece that differs in its first token counts as equal."""


@mutant_of("radix_cache")
class ComparesTheWrongPiece(
    with_tree("as_array(key.token_ids[start + n :", "as_array(key.token_ids[start :")
):
    """What is compared with an edge is shifted by its first page."""


# What others hold


@mutant_of("radix_cache")
class ArraysOfTheCaller(changed("copy=True", "copy=False")):
    """Values are not copied: the caller's next change reaches the tree."""


@mutant_of("radix_cache")
class ResultsOfTheTree(
    changed(
        "return torch.cat([self.root.value,",
        "return values[0] if len(values) == 1 else torch.cat([self.root.value,",
    )
):
    """A match of one node gives the tree's own tensor."""


@mutant_of("radix_cache")
class ComesBackWithoutAHit(
    changed("        for ancestor in self._path(node):\n            self._touch(ancestor)\n", "")
):
    """A request that is cached again does not count as using the path that it locks."""


@mutant_of("radix_cache")
class ComesBackAtTheRoot(
    changed("return self._insert_below(node, start, key,", "return self._insert_below(self.root, start, key,")
):
    """What a request adds to its path hangs from the root."""
