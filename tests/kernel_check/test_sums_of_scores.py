"""Large scores in float32: sums of any order hold, coarser ones do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.kernels.attention_likes import EXTEND_LIKE
from diptych.shared.tools.conformance.kernels.attention_suspects import dense, rounding_of_scores
from diptych.shared.tools.conformance.kernels.conventions import convention_of
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.run import check_kernel
from tests.house.tree import ROOT
from tests.kernel_check.sums_of_scores import FILE, SHARP, Scores, attend_with, one_after_another, with_tf32


def check(scores: Scores, seed: int) -> Report:
    convention = convention_of("attention.extend", "torch")
    return check_kernel(attend_with(scores), "f", EXTEND_LIKE, convention, (SHARP,), seed=seed)


def test_float32_sums_of_large_scores_hold_though_the_row_of_the_table_is_exceeded() -> None:
    row, is_exceeded = tolerance("attention", torch.float32), False
    for seed in range(4):
        report = check(one_after_another, seed)
        assert report.status == 0, [each.failure for each in report.failing]
        problem = EXTEND_LIKE.make(SHARP, False, seed)
        args = [problem[name] for name in ("q", "k", "v", "page_table", "lens", "qo_indptr")]
        error = (attend_with(one_after_another)(*args) - problem.expected["out"]).abs()
        is_exceeded |= bool((error > row.allowed(problem.expected["out"])).any())
        assert error.max() < rounding_of_scores(problem)
    assert is_exceeded


def test_scores_of_tf32_are_found() -> None:
    report = check(with_tf32, 0)
    assert report.status == 1
    assert "values: out at" in str(report.failing[0].failure)


def test_scores_up_to_ten_keep_the_row_of_the_table() -> None:
    for case in EXTEND_LIKE.cases:
        problem = EXTEND_LIKE.make(case, False, 0)
        assert (problem.limit is not None) == (case == SHARP)


def test_the_page_has_what_is_recorded() -> None:
    found = json.loads(FILE.read_text(encoding="utf-8"))
    rows = found["largest errors"] | {
        "vLLM's kernel, from the float32 sums": found["vLLM from float32 sums"],
        "allowed, the least": found["least allowed"],
    }
    page = (ROOT / "docs" / "check-kernel.md").read_text(encoding="utf-8")
    assert "\n".join(f"| {name} | {error:.1e} |" for name, error in rows.items()) in page
    assert f"sums_of_scores {found['seeds']}`" in page


@pytest.mark.parametrize("case", EXTEND_LIKE.cases[::5], ids=lambda case: case.name)
def test_tokens_of_a_request_together_and_one_after_another_give_the_same(case: Any) -> None:
    problem = EXTEND_LIKE.make(case, True, 0)
    together, one_by_one = dense(problem, lse=True), dense(problem, lse=True, mask="")
    for name, expected in one_by_one.items():
        torch.testing.assert_close(together[name], expected, rtol=0, atol=1e-12)
