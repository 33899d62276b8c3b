"""A planted bug, and the two ways to plant one: a subclass, or words of the source that are changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.changed_modules import Change, changed

PLANTED: list[Mutant] = []


@dataclass(frozen=True, eq=False)
class Mutant:
    """`what` goes wrong. killers.json names the clause that must catch it, and its quickest case."""

    component: str
    name: str
    what: str
    make: Callable[[], Any]

    def __post_init__(self) -> None:
        assert self.what, f"{self.name}: say what goes wrong"
        PLANTED.append(self)

    @property
    def key(self) -> str:
        """Its name in killers.json."""
        return f"{self.component}-{self.name}"

    @cached_property
    def impl(self) -> Any:
        """Stands in for the component: a class, or for components that are modules, a module."""
        return self.make()


def plant(component: str, impl: Any, wrong: type, prefix: str = "") -> Mutant:
    """`impl`, which contains `wrong`: this class names the bug, and its docstring says what goes wrong."""
    return Mutant(component, prefix + wrong.__name__, wrong.__doc__ or "", lambda: impl)


def mutant_of(component: str) -> Callable[[Any], Mutant]:
    """Plants a subclass."""
    return lambda impl: plant(component, impl, impl)


def bugs_in(component: str, entry: str, *always: Change, folder: str = "") -> Callable[..., Mutant]:
    """Plants changed words in what `entry` (module:class, or a module) is made of. A change: (module, before,
    after); the module is one of `folder`, or has its whole name. `always`: changes that each bug has."""
    module, _, attribute = entry.partition(":")

    def plant(name: str, what: str, *changes: tuple[str, str, str]) -> Mutant:
        own = [
            Change(
                file if file.startswith(("optimized.", "reference.", "shared.")) else folder + file,
                before,
                after,
            )
            for file, before, after in changes
        ]

        def make() -> Any:
            copy = changed(module, *always, *own)
            return getattr(copy, attribute) if attribute else copy

        return Mutant(component, name, what, make)

    return plant


def module_with(module: ModuleType, **replaced: Any) -> SimpleNamespace:
    """A component that is a module, with some of its classes replaced."""
    return SimpleNamespace(**{**vars(module), **replaced})
