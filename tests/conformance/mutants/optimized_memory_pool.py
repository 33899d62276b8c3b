"""Planted bugs in the optimized memory pools: words of their sources, changed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import diptych.optimized.memory_pool as pools
import diptych.optimized.page_ring as ring
from tests.conformance.mutants.mutant import Mutant


def source_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text("utf-8")


def planted(module: ModuleType, before: str, after: str) -> dict[str, Any]:
    """The names of a module in whose source `before`, which is there once, became `after`."""
    source = source_of(module)
    assert source.count(before) == 1, f"{source.count(before)} times: {before!r}"
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(source.replace(before, after), names)
    return names


def pool_with(name: str, what: str, before: str, after: str) -> Mutant:
    """`what` goes wrong."""
    return Mutant("memory_pool", name, SimpleNamespace(**planted(pools, before, after)))


def ring_with(name: str, what: str, before: str, after: str) -> Mutant:
    """The pools over a changed ring of pages."""
    names: dict[str, Any] = {"__name__": pools.__name__}
    exec(source_of(pools), names)
    names["PageRing"] = planted(ring, before, after)["PageRing"]
    return Mutant("memory_pool", name, SimpleNamespace(**names))


MUTANTS = [
    # Free pages
    ring_with(
        "TakesWithoutMoving",
        "The next one gets the same pages.",
        "self._head = (self._head + num_pages) % self.num_pages",
        "pass",
    ),
    ring_with(
        "CountsTooMany",
        "Pages that are out go on counting as free.",
        "self.num_free -= num_pages",
        "pass",
    ),
    ring_with(
        "FreesTwice",
        "A page that is free can be freed.",
        "self._is_used[pages] = False",
        "pass",
    ),
    ring_with(
        "DoesNotWrapAround",
        "The ring's end is not followed by its beginning.",
        "self._ring[: len(pages) - num_before_end] = pages[num_before_end:]",
        "pass",
    ),
    ring_with(
        "FreesRepeatedPagesAgain",
        "A page whose slots are not side by side comes back as often as it is named.",
        "return pages[self._stamps[pages] == order]",
        "return pages",
    ),
    ring_with(
        "TakesWhatIsNotThere",
        "More pages are allocated than are free.",
        "if num_pages > self.num_free:",
        "if num_pages > self.num_pages:",
    ),
    # Slots
    pool_with(
        "StartsAPageInTheMiddle",
        "A prefix that ends within a page is extended on a new one.",
        "is_new = page >= 0",
        "is_new = page >= -1",
    ),
    pool_with(
        "PagesOfTheFirstRequest",
        "All requests of a batch are given the same new pages.",
        "pages[(first_page[request] + page)[is_new]]",
        "pages[page[is_new]]",
    ),
    pool_with(
        "DecodesOnTheSamePage",
        "At a page's end the next slot belongs to another page.",
        "slots[begins_page] = pages * self.page_size",
        "pass",
    ),
    pool_with(
        "BelievesTheLastSlot",
        "A last slot that cannot hold the last token is taken.",
        "is_valid = (lasts + 1) % self.page_size == prefixes % self.page_size",
        "is_valid = lasts == lasts",
    ),
    # Rows
    pool_with(
        "WritesOverTheNextRow",
        "Positions count from the table's beginning, not from the row's.",
        "_ragged(rows * self.max_len + first, num)",
        "_ragged((rows - 1) * self.max_len + first, num)",
    ),
    pool_with(
        "ReadIsAView",
        "What was read changes with the row.",
        "self.cpu_copy[req_pool_idx, start:end].astype(np.int64)",
        "self.cpu_copy[req_pool_idx, start:end]",
    ),
    pool_with(
        "RaggedFromTheFirst",
        "Every part begins where the first one does.",
        "np.repeat(starts - (ends - lens), lens)",
        "np.repeat(starts[:1] - 0 * ends, lens)",
    ),
    # KV
    pool_with(
        "MovesKAlone",
        "V stays behind.",
        "self._v[:, targets] = self._v[:, sources]",
        "pass",
    ),
]
globals().update({made.name: made for made in MUTANTS})
