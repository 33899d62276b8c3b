"""Cases, grids and tables; what is smaller than a case; which cases the fast cut keeps."""

from __future__ import annotations

import pytest
import torch

from diptych.shared.tools.conformance.clauses.case import Case, fields_of, grid, table
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.shrink import shrink, smaller_cases
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, clauses_of
from tests.conformance.fast_cut import ALONE, FEW, MAX_COVER, SLOW, fast_cases, pairwise_cover


class Sized(Case):
    """With a default, a rule and a method."""

    page_size = 4

    def check(self) -> None:
        if self.length < 1:
            raise ValueError("length must be at least 1")

    def num_pages(self) -> int:
        return -(-self.length // self.page_size)


def test_a_case_has_fields_an_id_and_defaults() -> None:
    case = Sized("five", length=5)
    assert (case.name, case.length, case.page_size, case.num_pages()) == ("five", 5, 4, 2)
    assert case.fields() == fields_of(case) == {"name": "five", "page_size": 4, "length": 5}
    assert repr(case) == "Sized(name='five', length=5)"
    assert case == Sized("five", length=5, page_size=4) != case.replace(length=6)
    assert case.replace(page_size=1).num_pages() == 5
    assert len({case, Sized("five", length=5)}) == 1


def test_a_case_is_immutable_and_valid() -> None:
    case = Sized("five", length=5)
    with pytest.raises(AttributeError, match="immutable"):
        case.length = 3
    with pytest.raises(AttributeError, match="no field 'size'"):
        _ = case.size
    with pytest.raises(ValueError, match="at least 1"):
        case.replace(length=0)


def test_a_grid_is_the_product_with_ids() -> None:
    cases = grid("page {page_size}, {dtype}, {shape}", page_size=(1, 4), dtype=torch.float16, shape=[(3, 2)])
    assert [case.name for case in cases] == ["page 1, float16, 3/2", "page 4, float16, 3/2"]
    assert (cases[1].dtype, cases[1].shape) == (torch.float16, (3, 2))
    named = grid(lambda size, is_last: f"{size}{', last' * is_last}", size=(1, 2), is_last=(False, True))
    assert [case.name for case in named] == ["1", "1, last", "2", "2, last"]


def test_a_table_has_a_case_for_each_row() -> None:
    cases = table("length page_size", ("short", 1), ("long", 9, 16), of=Sized, page_size=2)
    assert [(case.name, case.length, case.page_size) for case in cases] == [("short", 1, 2), ("long", 9, 16)]
    assert table("a b", (1, 2), name="{a} of {b}")[0].name == "1 of 2"
    with pytest.raises(AssertionError, match="more than"):
        table("a", ("name", 1, 2))


def test_smaller_cases_are_cases() -> None:
    case = Sized("five", length=5, calls=(3, 4))
    smaller = list(smaller_cases(case))
    assert {each.length for each in smaller} == {1, 2, 4, 5}
    assert all(isinstance(each, Sized) and each.name == "five" for each in smaller)
    assert shrink(case, lambda each: sum(each.calls) >= 4).fields() == {
        "name": "five", "page_size": 0, "length": 1, "calls": (4,),
    }  # fmt: skip


def test_the_fast_cut_covers_pairs_and_keeps_few() -> None:
    cases = grid("{a}{b}{c}", a=range(2), b=range(2), c=range(2))
    kept = [case for case in cases if case.name in pairwise_cover(cases)]
    assert {(case.a, case.b) for case in kept} == {(a, b) for a in range(2) for b in range(2)}
    assert {(case.b, case.c) for case in kept} == {(b, c) for b in range(2) for c in range(2)}
    assert len(kept) <= MAX_COVER < len(cases)
    many = grid("{a}{b}{c}", a=range(9), b=range(9), c=range(9))
    assert len(pairwise_cover(many)) == MAX_COVER
    clause = Clause("clause", "", many, lambda impl, case: None, "contract")
    cut = fast_cases([clause])["clause"]
    assert cut.half < cut.whole
    assert (len(cut.half), len(cut.whole)) == (MAX_COVER // 2, MAX_COVER)
    assert len(fast_cases([clause], "scheduler")["clause"].half) == 1


def test_cases_that_the_fast_cut_names_exist() -> None:
    assert set(CONTRACTS) >= SLOW
    clauses = [clause for component in CONTRACTS for clause in clauses_of(component)]
    for name, named in ALONE.items():
        assert any(
            clause.name == name and named <= {case.name for case in clause.cases} for clause in clauses
        )


def test_clauses_with_the_same_axis_cover_it_together() -> None:
    families = grid("{family}", family=range(13))
    clauses = [Clause(f"clause-{i}", "", families, lambda impl, case: None, "contract") for i in range(5)]
    kept = {name: cut.whole for name, cut in fast_cases(clauses).items()}
    assert {len(names) for names in kept.values()} == {FEW}
    assert set().union(*kept.values()) == {case.name for case in families}


def test_ids_are_distinct() -> None:
    for component in CONTRACTS:
        for clause in clauses_of(component):
            names = [case.name for case in clause.cases]
            assert len(set(names)) == len(names), f"{component} {clause.name}"
