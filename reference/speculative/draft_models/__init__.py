"""The draft models that read a target's hidden states, by format."""

from __future__ import annotations

from importlib import import_module

from diptych.shared.config.draft import DraftFormat
from diptych.shared.interfaces.draft_model import DraftModel

DRAFT_MODELS: dict[str, str] = {
    "eagle": "diptych.reference.speculative.draft_models.eagle_layer:EagleModel",
    "eagle3": "diptych.reference.speculative.draft_models.eagle3:Eagle3Model",
    "dflash": "diptych.reference.speculative.draft_models.dflash_model:DFlashModel",
    "nextn": "diptych.reference.speculative.draft_models.nextn:NextNModel",
}


def draft_model_class(draft_format: DraftFormat) -> type[DraftModel]:
    """The class for a format; an unknown one raises `ValueError` listing the known ones."""
    if draft_format not in DRAFT_MODELS:
        raise ValueError(
            f"no draft model of format {draft_format!r}; the formats are {', '.join(DRAFT_MODELS)}"
        )
    module, name = DRAFT_MODELS[draft_format].split(":")
    return getattr(import_module(module), name)
