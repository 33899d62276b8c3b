"""Definitions as FlashInfer writes them, which differ from those of FlashInfer Trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.formats.trace_check import check_solution
from diptych.shared.tools.conformance.formats.trace_files import read_definition, solution_of_function
from tests.kernel_check.test_formats import written

DUMP: dict[str, Any] = {
    "name": "scaled_h8", "op_type": "scaling", "tags": ["fi_api:library.scaled"],
    "axes": {"rows": {"type": "var"}, "bytes": {"type": "const", "value": 8}, "size": {"type": "const"}},
    "inputs": {"packed": {"shape": ["rows", "bytes"], "dtype": "uint8"},
               "scale": {"shape": ["rows"], "dtype": "uint8"},
               "x": {"shape": ["rows", "bytes"], "dtype": "float32"},
               "places": {"shape": ["rows"], "dtype": "unknown", "optional": True}},
    "outputs": {"x": {"shape": ["rows", "bytes"], "dtype": "float32"}},
    "reference": "import torch\n\ndef _low(a):\n    return a & 15\n\n"
    "def _scaled_reference(packed, scale, x, places=None):\n"
    "    return x + _low(packed).float() * torch.exp2(scale.float() - 116)[:, None]\n",
}  # fmt: skip


def test_dumps_of_flashinfer_are_read(tmp_path: Path) -> None:
    """uint8 numbers and scales, a reference with a name of its own, a result with the name of an input."""
    path = written(tmp_path, "dump.json", DUMP)
    definition = read_definition(path)
    assert (definition.run, definition.axes["size"]) == ("_scaled_reference", None)
    assert set(definition.outputs) == {"x_out"}
    assert definition.inputs["places"].dtype == torch.int32
    for change, status in (("15", 0), ("7", 1)):
        file = tmp_path / f"low_{change}.py"
        file.write_text(str(DUMP["reference"]).replace("15", change))
        (report,) = check_solution(definition, solution_of_function(f"{file}:_scaled_reference", definition))
        assert report.status == status, [each.failure for each in report.failing]
    no_dump = DUMP | {"tags": [], "outputs": {}, "axes": {**DUMP["axes"], "size": {"type": "var"}}}
    path = written(tmp_path, "no_dump.json", no_dump)
    with pytest.raises(ValueError, match="no function run"):
        read_definition(path)
