"""Planted bugs in the optimized memory pools: words of their sources, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("memory_pool", "optimized.memory_pool", folder="optimized.")

# fmt: off

# Free pages
bug("FreesTwice", "A page that is free can be freed.", ("page_ring", "self._is_used[pages] = False", "pass"))
bug("DoesNotWrapAround", "The ring's end is not followed by its beginning.",
    ("page_ring", "self._ring[: len(pages) - num_before_end] = pages[num_before_end:]", "pass"))
bug("FreesRepeatedPagesAgain", "A page whose slots are not side by side comes back as often as it is named.",
    ("page_ring", "return pages[self._stamps[pages] == order]", "return pages"))
bug("TakesWhatIsNotThere", "More pages are allocated than are free.",
    ("page_ring", "if num_pages > self.num_free:", "if num_pages > self.num_pages:"))

# Slots
bug("StartsAPageInTheMiddle", "A prefix that ends within a page is extended on a new one.",
    ("memory_pool", "is_new = page >= 0", "is_new = page >= -1"))
bug("PagesOfTheFirstRequest", "All requests of a batch are given the same new pages.",
    ("memory_pool", "pages[(first_page[request] + page)[is_new]]", "pages[page[is_new]]"))
bug("DecodesOnTheSamePage", "At a page's end the next slot belongs to another page.",
    ("memory_pool", "slots[begins_page] = pages * self.page_size", "pass"))
bug("BelievesTheLastSlot", "A last slot that cannot hold the last token is taken.",
    ("memory_pool", "is_valid = (lasts + 1) % self.page_size == prefixes % self.page_size",
     "is_valid = lasts == lasts"))

# Rows
bug("WritesOverTheNextRow", "A prefix goes to the row behind the request's.",
    ("memory_pool", "self.cpu_copy[row, start:end] = values",
     "self.cpu_copy[row % self.size + 1, start:end] = values"))
bug("ReadIsAView", "What was read changes with the row.",
    ("memory_pool", "self.cpu_copy[req_pool_idx, start:end].astype(np.int64)",
     "self.cpu_copy[req_pool_idx, start:end]"))

# KV
bug("MovesKAlone", "V stays behind.", ("memory_pool", "self._v[:, targets] = self._v[:, sources]", "pass"))
