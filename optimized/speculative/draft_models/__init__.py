"""The draft models that read a target's hidden states, by format.

Differs from reference: EAGLE-3, the format of most public heads, and DFlash have fused layers. Assumes that
the others, which are taken from the reference, are rare. Loses nothing: a name is looked up once.
"""

from __future__ import annotations

from importlib import import_module

from diptych.shared import registry
from diptych.shared.config.draft import DraftFormat
from diptych.shared.interfaces.draft_model import DraftModel

DRAFT_MODELS: dict[str, str] = {
    "dflash": "diptych.optimized.speculative.draft_models.dflash_model:DFlashModel",
    "eagle3": "diptych.optimized.speculative.draft_models.eagle3:Eagle3Model",
}


def draft_model_class(draft_format: DraftFormat) -> type[DraftModel]:
    """The class for a format; an unknown one raises `ValueError` listing the known ones."""
    if draft_format not in DRAFT_MODELS:
        found: type[DraftModel] = registry.load("draft_models", "reference").draft_model_class(draft_format)
        return found
    module, name = DRAFT_MODELS[draft_format].split(":")
    return getattr(import_module(module), name)
