"""The drafters, by the algorithm that `speculative` names.

Differs from reference: drafting with a model is this panel's own. Assumes that the rest, which has no file
here, is good enough as it is. It loses nothing: a name is looked up once.
"""

from __future__ import annotations

from importlib import import_module

from shared import registry
from shared.interfaces import Drafter

DRAFTERS = {
    "eagle": "optimized.speculative.eagle:EagleDrafter",
    "eagle3": "optimized.speculative.eagle:EagleDrafter",
    "nextn": "optimized.speculative.eagle:EagleDrafter",
    "standalone": "optimized.speculative.standalone:StandaloneDrafter",
}


def drafter_class(algorithm: str) -> type[Drafter]:
    """The class for an algorithm; one that is missing raises `ValueError` listing what there is."""
    if algorithm not in DRAFTERS:
        found: type[Drafter] = registry.load("drafter", "reference").drafter_class(algorithm)
        return found
    module, name = DRAFTERS[algorithm].split(":")
    return getattr(import_module(module), name)
