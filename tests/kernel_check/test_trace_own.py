"""Components of this project as Solutions of FlashInfer Trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.tools.conformance.formats import trace_check
from diptych.shared.tools.conformance.formats.trace_check import check_solution
from diptych.shared.tools.conformance.formats.trace_files import Solution, read_definition
from diptych.shared.tools.conformance.formats.trace_own import OWN
from tests.kernel_check.test_formats import written
from tests.kernel_check.test_trace_dumps import HereFunction
from tests.kernel_check.trace_data import DEFINITIONS


@pytest.mark.parametrize(
    "op_type", [pytest.param(each, marks=[pytest.mark.full] * (each != "rope")) for each in OWN]
)
def test_they_hold(op_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_check, "ChildFunction", HereFunction)
    definition = read_definition(written(tmp_path, "definition.json", DEFINITIONS[op_type]))
    own = Solution("own", definition.name, {"main.py": OWN[op_type]}, "main.py", "run", False)
    for report in check_solution(definition, own, seed=1):
        assert report.status == 0, [(each.case, each.failure) for each in report.failing]
        assert report.num_refused == 0
