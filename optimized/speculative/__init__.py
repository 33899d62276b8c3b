"""The drafters, by the algorithm that `speculative` names.

Differs from reference: every drafter runs ahead of the CPU. Loses nothing: a name is looked up once.
"""

from __future__ import annotations

from importlib import import_module

from diptych.shared.interfaces import Drafter

DRAFTERS = {
    "eagle": "diptych.optimized.speculative.eagle:EagleDrafter",
    "eagle3": "diptych.optimized.speculative.eagle:EagleDrafter",
    "nextn": "diptych.optimized.speculative.eagle:EagleDrafter",
    "dflash": "diptych.optimized.speculative.dflash:DFlashDrafter",
    "ngram": "diptych.optimized.speculative.ngram_lookup:NgramLookupDrafter",
    "standalone": "diptych.optimized.speculative.standalone:StandaloneDrafter",
}


def drafter_class(algorithm: str) -> type[Drafter]:
    """The class for an algorithm; an unknown one raises `ValueError` listing the known ones."""
    if algorithm not in DRAFTERS:
        raise ValueError(f"no drafter for {algorithm!r}; there are {', '.join(DRAFTERS)}")
    module, name = DRAFTERS[algorithm].split(":")
    return getattr(import_module(module), name)
