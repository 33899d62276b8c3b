"""The clauses of attention catch bugs in the kernels themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.reference.attention import TorchAttention
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from tests.conformance.mutants.optimized_attention import MUTANTS, SPLIT_MUTANTS, KernelMutant
from tests.kernels.test_decode_attention import expect_steps


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_clause_catches_it(mutant: KernelMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clauses = [clause for clause in clauses_of("attention") if clause.name == mutant.clause]
    assert clauses, f"there is no clause {mutant.clause}"
    impl = mutant.build(tmp_path, monkeypatch)
    verdicts = check_implementation(clauses, impl, TorchAttention, shrink_failures=False)
    failures = (verdict.failure for verdict in verdicts if verdict.failure is not None)
    failure = next(failures, None)
    assert failure is not None, f"{mutant.name} survives"
    assert failure.what != "raised", f"{mutant.name} does not run: {failure.actual}"


@pytest.mark.parametrize("mutant", SPLIT_MUTANTS, ids=lambda mutant: mutant.name)
def test_steps_of_long_requests_catch_it(
    mutant: KernelMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Mismatch, match="output of step"):
        expect_steps(mutant.build(tmp_path, monkeypatch))
