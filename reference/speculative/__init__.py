"""The drafters, by the algorithm that `speculative` names."""

from __future__ import annotations

from importlib import import_module

from diptych.shared.interfaces import Drafter

DRAFTERS = {
    "eagle": "diptych.reference.speculative.eagle:EagleDrafter",
    "eagle3": "diptych.reference.speculative.eagle:EagleDrafter",
    "dflash": "diptych.reference.speculative.dflash:DFlashDrafter",
    "nextn": "diptych.reference.speculative.eagle:EagleDrafter",
    "standalone": "diptych.reference.speculative.standalone:StandaloneDrafter",
    "ngram": "diptych.reference.speculative.ngram:NgramDrafter",
}


def drafter_class(algorithm: str) -> type[Drafter]:
    """The class for an algorithm; an unknown one raises `ValueError` listing the known ones."""
    if algorithm not in DRAFTERS:
        raise ValueError(f"no drafter for speculative={algorithm}; there are {', '.join(DRAFTERS)}")
    module, name = DRAFTERS[algorithm].split(":")
    return getattr(import_module(module), name)
