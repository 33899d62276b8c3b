"""A planted bug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """`impl` stands in for the component: a class, or for components that are modules, a namespace. `first`:
    modules of the contract whose clauses are tried before the others, where it is known who catches it."""

    component: str
    name: str
    impl: Any
    first: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its name in killers.json."""
        return f"{self.component}-{self.name}"


def mutant_of(component: str) -> Callable[[Any], Mutant]:
    """Turns a subclass into a Mutant, named after it; its docstring says what goes wrong."""

    def make(impl: Any) -> Mutant:
        assert impl.__doc__, f"{impl.__name__}: say what goes wrong"
        return Mutant(component, impl.__name__, impl)

    return make


def module_with(module: ModuleType, **replaced: Any) -> SimpleNamespace:
    """A component that is a module, with some of its classes replaced."""
    return SimpleNamespace(**{**vars(module), **replaced})
