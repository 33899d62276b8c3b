"""What an implementation must be before its behaviour can be checked: a class of the interface, complete."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import isclass
from types import ModuleType
from typing import Any

from shared import interfaces
from shared.conformance.clause import Clause
from shared.conformance.compare import Mismatch

_CLASSES: dict[str, type] = {
    "scheduler": interfaces.Scheduler,
    "schedule_policy": interfaces.SchedulePolicy,
    "prefill_adder": interfaces.PrefillAdder,
    "radix_cache": interfaces.PrefixCache,
    "chunk_cache": interfaces.PrefixCache,
    "attention": interfaces.AttentionBackend,
    "moe": interfaces.MoE,
    "model_runner": interfaces.ModelRunner,
    "sampler": interfaces.Sampler,
    "draft_tree": interfaces.DraftTreeOps,
}
"""component -> the interface that its class implements"""

_MODULES: dict[str, tuple[type, ...]] = {
    "memory_pool": (
        interfaces.ReqToTokenPool,
        interfaces.TokenToKVPoolAllocator,
        interfaces.TokenToKVPool,
    ),
    "layers": (interfaces.RMSNorm, interfaces.RotaryEmbedding, interfaces.SiluAndMul),
    "models": (),  # classes are found by architecture
    "draft_models": (),  # ... by format
    "drafter": (),  # ... by algorithm; or it is a class
}
"""component that is a module -> the interfaces of which it holds a class each, under the same names"""


@dataclass(frozen=True)
class Surface:
    name: str


def interface_of(component: str) -> type | tuple[type, ...]:
    """The interface of a component; of one that is a module of classes: all of theirs."""
    return _CLASSES[component] if component in _CLASSES else _MODULES[component]


def problem_with(component: str, impl: Any) -> str | None:
    """One sentence on why `impl` cannot stand behind the component at all; None when it can."""
    if component in _CLASSES:
        return _problem_with_class(impl, _CLASSES[component])
    for interface in _MODULES[component]:
        if not hasattr(impl, interface.__name__):
            names = ", ".join(expected.__name__ for expected in _MODULES[component])
            return f"{_name(impl)} has no {interface.__name__}; it must hold {names}"
        problem = _problem_with_class(getattr(impl, interface.__name__), interface)
        if problem is not None:
            return problem
    return None


def surface_clause(component: str) -> Clause:
    """The clause that `problem_with` is about: a verdict on it reads like any other."""

    def check(impl: Any, case: Surface) -> None:
        problem = problem_with(component, impl)
        if problem is not None:
            raise Mismatch("interface", f"an implementation of {case.name}", problem)

    interface = interface_of(component)
    wanted = interface if isinstance(interface, tuple) else (interface,)
    names = ", ".join(f"shared.interfaces.{one.__name__}" for one in wanted) or "a module of models"
    statement = f"It implements {names}: a subclass, no method missing."
    return Clause("implements-the-interface", statement, (Surface(names),), check, "contract")


def _problem_with_class(impl: Any, interface: type) -> str | None:
    if isinstance(impl, ModuleType):
        return f"{_name(impl)} is a module: name the class in it, {_spelling(impl)}:Class"
    if not isclass(impl):
        return f"{_name(impl)} is no class"
    missing = sorted(
        method
        for method in getattr(interface, "__abstractmethods__", ())
        if getattr(impl, method, None) in (None, getattr(interface, method))
        or method in getattr(impl, "__abstractmethods__", ())
        or (method == "__init__" and impl.__init__ is object.__init__)
    )
    is_subclass = issubclass(impl, interface)
    if is_subclass and not missing:
        return None
    parts = [] if is_subclass else [f"is no subclass of shared.interfaces.{interface.__name__}"]
    if missing:
        parts.append(f"lacks {', '.join(missing)}")
    return f"{impl.__name__} {' and '.join(parts)}"


def _name(impl: Any) -> str:
    return getattr(impl, "__name__", None) or type(impl).__name__


def _spelling(module: ModuleType) -> str:
    is_file = module.__name__.startswith("diptych_user_")
    return (module.__file__ or module.__name__) if is_file else module.__name__
