"""Component name + choice -> implementation. Nothing is imported until it is chosen."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PANELS = ("reference", "optimized")

IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "scheduler": {"reference": "reference.scheduler:Scheduler"},
    "schedule_policy": {"reference": "reference.schedule_policy:SchedulePolicy"},
    "prefill_adder": {"reference": "reference.prefill_adder:PrefillAdder"},
    "radix_cache": {"reference": "reference.radix_cache:RadixCache"},
    "chunk_cache": {"reference": "reference.chunk_cache:ChunkCache"},
    "memory_pool": {"reference": "reference.memory_pool"},
    "attention": {"reference": "reference.attention:TorchAttention"},
    "layers": {"reference": "reference.layers"},
    "moe": {"reference": "reference.moe:MoE"},
    "models": {"reference": "reference.models"},
    "model_runner": {"reference": "reference.model_runner:ModelRunner"},
    "sampler": {"reference": "reference.sampler:Sampler"},
}
"""component -> choice -> "module" or "module:attribute". A choice is a panel's name or a backend's."""


def choices(component: str) -> list[str]:
    """Names that may stand behind `component=`; an unknown component raises `ValueError`."""
    if component not in IMPLEMENTATIONS:
        raise ValueError(f"unknown component {component!r}; the components are {', '.join(IMPLEMENTATIONS)}")
    return list(IMPLEMENTATIONS[component])


def parse_use(text: str) -> dict[str, str]:
    """ "attention=triton,sampler=reference" -> a mapping. Raises `ValueError` on anything else."""
    chosen: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        component, equals, choice = item.partition("=")
        if not equals or not choice:
            raise ValueError(f"--use takes component=implementation, got {item!r}")
        choices(component)
        chosen[component] = choice
    return chosen


def select(panel: str, use: Mapping[str, str]) -> dict[str, str]:
    """The choice for every component: what `use` says, else the panel's, else, where the optimized panel
    changes nothing, the reference's."""
    if panel == "optimized" and not has_optimized():
        raise ValueError("the optimized panel has no component yet; use panel=reference")
    selection: dict[str, str] = {}
    for component, available in IMPLEMENTATIONS.items():
        selection[component] = panel if panel in available else "reference"
    for component, choice in use.items():
        check_choice(component, choice)
        selection[component] = choice
    return selection


def check_choice(component: str, choice: str) -> None:
    """Raise `ValueError` listing the right ones for a name that stands for nothing."""
    if choice not in choices(component) and not _is_target(choice):
        raise ValueError(
            f"{component}={choice}: no such implementation; choose one of {', '.join(choices(component))}, "
            "or name one of yours as package.module:Class or file.py:Class"
        )


def has_optimized() -> bool:
    return any("optimized" in available for available in IMPLEMENTATIONS.values())


def load(component: str, choice: str) -> Any:
    """The class (or module of classes) behind a choice; imports it now."""
    target = IMPLEMENTATIONS.get(component, {}).get(choice, choice)
    module_name, _, attribute = target.partition(":")
    module = _load_file(module_name) if module_name.endswith(".py") else _import(component, module_name)
    if not attribute:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{component}={choice}: {module_name} has no {attribute!r}") from None


def _is_target(choice: str) -> bool:
    return ":" in choice or "." in choice


def _import(component: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing in ("triton", "flashinfer"):
            raise ValueError(
                f"{component} from {module_name} needs {missing}: pip install 'diptych[gpu]'"
            ) from None
        raise ValueError(f"{component}: cannot import {module_name}: no module named {missing!r}") from None


def _load_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    name = f"diptych_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
