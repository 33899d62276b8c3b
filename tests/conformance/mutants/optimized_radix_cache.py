"""Planted bugs in the optimized radix cache: words of its source, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("radix_cache", "optimized.radix_cache:RadixCache", folder="optimized.")

# fmt: off

# The heap
bug("HeapIgnoresLocks", "A leaf that was locked after its entry was made is taken.",
    ("eviction_heap", "not node.children and node.lock_ref == 0 and", "not node.children and"))
bug("HeapIgnoresChildren", "A node that got children after its entry was made is taken.",
    ("eviction_heap", "not node.children and node.lock_ref == 0 and", "node.lock_ref == 0 and"))
bug("UnlockedLeavesAreForgotten",
    "A leaf whose entry was dropped while it was locked never gets another one.",
    ("radix_cache", "self.heap.add(node)  # its ancestors have children", "pass"))
bug("SplitTakesTheEntry",
    "The upper half of a split counts as being in the heap, where only the lower one is.",
    ("radix_cache", "upper.lock_ref = child.lock_ref",
     "upper.lock_ref, upper.is_queued = child.lock_ref, True"))
bug("NewLeavesAreForgotten", "A leaf gets its entry with its first unlock only.",
    ("radix_cache", "        self.heap.add(leaf)\n", ""))
bug("EvictsWhatWasDiscarded",
    "A leaf that was discarded still has its entry, and is taken for one of the tree.",
    ("eviction_heap", "node.parent is not None", "(node.parent or node.node_id)"))
bug("DiscardingLeavesNoLeaf",
    "A parent that becomes a leaf because its children are discarded gets no entry.",
    ("radix_cache", "            self.heap.add(parent)\n            self._free", "            self._free"))
bug("MruEntriesAreNotRenewed", "Under mru a leaf that is used keeps the place of an earlier use.",
    ("eviction_heap", "if self.falls_with_use and node.is_queued:", "if False:"))

# Splits and sizes
bug("SplitKeepsTheLength", "The lower half of a split counts as long as the whole.",
    ("radix_cache", "        child.num_slots -= upper_len\n", ""))
bug("LowerHalfReadsTheUpperSlots", "Both halves of a split begin with the same slot.",
    ("array_tree", "node.value[start:end]", "node.value[: end - start]"))
bug("EvictedSizeStays", "Evicted tokens go on counting as evictable.",
    ("radix_cache", "        self._evictable_size -= leaf.num_slots\n", ""))
bug("UnlockedSizeStays", "Unlocked tokens go on counting as protected.",
    ("radix_cache", "self._protected_size -= ancestor.num_slots", "pass"))

# Comparing
bug("MatchEndsWithinAPage", "Edges are cut where keys part, within a page or not.",
    ("array_tree", "return round_down_to_page(n - key.is_bigram, page_size)", "return n - key.is_bigram"))
bug("MatchesPastTheEnd", "The last piece of a comparison counts as long as a whole one.",
    ("array_tree", "n += len(piece)", "n += piece_len"))
bug("MissesTheFirstDifference", "A piece that differs in its first token counts as equal.",
    ("array_tree", "if piece.tobytes() != stored.tobytes():",
     "if piece[1:].tobytes() != stored[1:].tobytes():"))
bug("ComparesTheWrongPiece", "What is compared with an edge is shifted by its first page.",
    ("array_tree", "as_array(key.token_ids[start + n :", "as_array(key.token_ids[start :"))

# What others hold
bug("ArraysOfTheCaller", "Values are not copied: the caller's next change reaches the tree.",
    ("radix_cache", "copy=True", "copy=False"))
bug("ResultsOfTheTree", "A match of one node gives the tree's own tensor.",
    ("radix_cache", "return torch.cat([self.root.value,",
     "return values[0] if len(values) == 1 else torch.cat([self.root.value,"))
bug("ComesBackWithoutAHit", "A request that is cached again does not count as using the path that it locks.",
    ("radix_cache", "        for ancestor in self._path(node):\n            self._touch(ancestor)\n", ""))
bug("ComesBackAtTheRoot", "What a request adds to its path hangs from the root.",
    ("radix_cache", "return self._insert_below(node, start, key,",
     "return self._insert_below(self.root, start, key,"))
