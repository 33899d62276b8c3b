"""The clause that an implementation has the interface of its component."""

from __future__ import annotations

from typing import Any

from shared.conformance.case import Case
from shared.conformance.clause import Clause
from shared.conformance.compare import Mismatch
from shared.engine.component_check import interface_of, problem_with


def surface_clause(component: str) -> Clause:
    """`problem_with` as a clause, so that its verdict is reported like any other."""

    def check(impl: Any, case: Case) -> None:
        problem = problem_with(component, impl)
        if problem is not None:
            raise Mismatch("interface", f"an implementation of {case.name}", problem)

    interface = interface_of(component)
    wanted = interface if isinstance(interface, tuple) else (interface,)
    names = ", ".join(f"shared.interfaces.{one.__name__}" for one in wanted) or "a module of models"
    statement = f"It implements {names}: a subclass, no method missing."
    return Clause("implements-the-interface", statement, (Case(names),), check, "contract")
