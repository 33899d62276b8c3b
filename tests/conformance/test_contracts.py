"""Every clause of every contract, on every implementation that is registered."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, clauses_of
from tests.conformance.fast_cut import fast_cases
from tests.gpu.flashinfer_modules import modules_of

ON_THE_HOST = (
    "schedule_policy", "prefill_adder", "scheduler", "radix_cache", "chunk_cache", "detokenizer",
    "expert_balancer", "transport", "collectives", "expert_dispatch", "drafter",
)  # fmt: skip
"""Components without a tensor on a GPU, or whose contracts have theirs on the CPU: `make test-gpu` leaves
them out."""


def marks(component: str, choice: str, clause: Clause, case: Any, is_one_of_few: bool) -> list[Any]:
    """Off a GPU the panel's own choice of attention is `triton`, which is there under its name. On a GPU,
    flex_attention compiles for seconds in each case, and has one of each clause."""
    is_left_out = component in ON_THE_HOST or (choice == "flex_attention" and not is_one_of_few)
    marks = [] if is_left_out else [pytest.mark.contract]
    needs_cuda = registry.needs_cuda(component, choice)
    if needs_cuda or (choice == "optimized" and component in ("attention", "mla_attention")):
        marks.append(pytest.mark.gpu)
    if needs_cuda or (choice == "optimized" and component == "attention"):
        marks.append(pytest.mark.compiled(*modules_of(choice, clause.name, case)))
    return marks


def cases() -> list[Any]:
    params = []
    for component in CONTRACTS:
        clauses = clauses_of(component)
        cuts = fast_cases(clauses, component)
        whole, half = ({name: cut[i] for name, cut in cuts.items()} for i in range(2))
        few = {c.name: [case.name for case in c.cases if case.name in half[c.name]][:1] for c in clauses}
        none: dict[str, set[str]] = {name: set() for name in half}  # flex_attention takes seconds to import
        own = {**none, **{name: half[name] for name in ("independent-rows",) if name in half}}
        for clause in clauses:
            for choice in registry.choices(component):
                fast = {"reference": half, "flex_attention": none, "deterministic": own}.get(choice, whole)
                for case in clause.cases:
                    name = f"{component}-{choice}-{clause.name}-{case.name}"
                    params.append(
                        pytest.param(
                            component,
                            choice,
                            clause,
                            case,
                            id=name.replace(" ", "_"),
                            marks=[
                                *marks(component, choice, clause, case, case.name in few[clause.name]),
                                *([] if case.name in fast[clause.name] else [pytest.mark.full]),
                            ],
                        )
                    )
    return params


@pytest.mark.parametrize(("component", "choice", "clause", "case"), cases())
def test_clause(component: str, choice: str, clause: Clause, case: Any) -> None:
    clause.run(registry.load(component, choice), case, registry.load(component, "reference"))


def test_every_component_has_clauses_with_distinct_names() -> None:
    assert set(CONTRACTS) == set(registry.IMPLEMENTATIONS)
    for component in CONTRACTS:
        names = [clause.name for clause in clauses_of(component)]
        assert names, component
        assert len(set(names)) == len(names), component
