"""Components of this project as Solutions of FlashInfer Trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.tools.conformance.formats import trace_check
from diptych.shared.tools.conformance.formats.trace_check import check_solution
from diptych.shared.tools.conformance.formats.trace_files import Solution, read_definition
from diptych.shared.tools.conformance.formats.trace_own import KERNELS, OWN
from diptych.shared.tools.conformance.formats.trace_references import OUTPUT_ALONE
from tests.kernel_check.test_formats import written
from tests.kernel_check.test_trace_dumps import HereFunction
from tests.kernel_check.trace_data import DEFINITIONS


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.full] * (each != "rope")) for each in {**OWN, **KERNELS}]
)
def test_they_hold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(trace_check, "ChildFunction", HereFunction)
    data, sources = (OUTPUT_ALONE, KERNELS) if name in KERNELS else (DEFINITIONS, OWN)
    definition = read_definition(written(tmp_path, "definition.json", data[name]))
    own = Solution("own", definition.name, {"main.py": sources[name]}, "main.py", "run", False)
    for report in check_solution(definition, own, seed=1):
        assert report.status == 0, [(each.case, each.failure) for each in report.failing]
        assert report.num_refused == 0
