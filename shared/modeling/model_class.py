"""The class of a panel for an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from diptych.shared.config.families import FAMILIES
from diptych.shared.interfaces.model import CausalLM


def find_class(architecture: str, classes: Mapping[str, str]) -> type[CausalLM]:
    """`classes`: "module:class" by `Family.decoder`. Raises `ValueError` for an unknown architecture."""
    if architecture not in FAMILIES:
        raise ValueError(f"no model for architecture {architecture!r}; supported are {', '.join(FAMILIES)}")
    module, name = classes[FAMILIES[architecture].decoder].split(":")
    found: type[CausalLM] = getattr(import_module(module), name)
    return found
