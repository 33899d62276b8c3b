"""Definitions as FlashInfer writes them, which differ from those of FlashInfer Trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.formats import trace_check
from diptych.shared.tools.conformance.formats.trace_check import check_solution
from diptych.shared.tools.conformance.formats.trace_files import read_definition, solution_of_function
from diptych.shared.tools.conformance.formats.trace_ops import op_of
from diptych.shared.tools.conformance.kernels.functions import LocalFunction
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.target import load_function
from tests.kernel_check.test_formats import written
from tests.kernel_check.trace_data import DEFINITIONS

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


class HereFunction(LocalFunction):
    """A function in this process, which starts in no time."""

    def __init__(self, target: str, *_: Any) -> None:
        super().__init__(load_function(target))

    def __enter__(self) -> HereFunction:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_check, "ChildFunction", HereFunction)


def reports_of(folder: Path, data: dict[str, Any], old: str = "", new: str = "") -> list[Report]:
    """On the reference of a Definition with this change, as a Solution."""
    definition = read_definition(written(folder, "dump.json", data))
    file = folder / f"{len(list(folder.iterdir()))}.py"
    file.write_text(str(data["reference"]).replace(old, new))
    return check_solution(definition, solution_of_function(f"{file}:{definition.run}", definition), seed=1)


def test_dumps_of_flashinfer_are_read(tmp_path: Path) -> None:
    """uint8 numbers and scales, a reference with a name of its own, a result with the name of an input."""
    path = written(tmp_path, "dump.json", DUMP)
    definition = read_definition(path)
    assert (definition.run, definition.axes["size"]) == ("_scaled_reference", None)
    assert set(definition.outputs) == {"x_out"}
    assert definition.inputs["places"].dtype == torch.int32
    for change, status in (("15", 0), ("7", 1)):
        (report,) = reports_of(tmp_path, DUMP, "15", change)
        assert report.status == status, [each.failure for each in report.failing]
    no_dump = DUMP | {"tags": [], "outputs": {}, "axes": {**DUMP["axes"], "size": {"type": "var"}}}
    for old, says in (("unknown", "dtype of places is 'unknown'"), ("int32", "no function run")):
        text = json.dumps(no_dump).replace("unknown", old)
        with pytest.raises(ValueError, match=says):
            read_definition(written(tmp_path, "no_dump.json", json.loads(text)))


NORM = DEFINITIONS["rmsnorm"] | {"tags": DUMP["tags"]}
GEMMA = NORM | {"reference": NORM["reference"].replace("weight.float()", "(1 + weight.float())")}


def test_a_dump_of_another_operation_is_compared_with_its_reference(tmp_path: Path) -> None:
    (report,) = reports_of(tmp_path, GEMMA)
    assert report.status == 0, [each.failure for each in report.failing]
    assert "another operation than the known rmsnorm, of which 7 of 7 cases fail" in report.notes[0]
    (report,) = reports_of(tmp_path, GEMMA, "(1 + weight", "(weight")
    assert report.status == 1
    reference, report = reports_of(tmp_path, GEMMA | {"tags": []})
    assert reference.status == report.status == 1


def test_a_reference_without_all_results_is_refused(tmp_path: Path) -> None:
    x = NORM["inputs"]["hidden_states"]
    more = {"inputs": {**NORM["inputs"], "residual": x}, "outputs": {**NORM["outputs"], "residual": x}}
    reference = NORM["reference"].replace("weight):", "weight, residual):")
    with pytest.raises(ValueError, match="reference does not return all of output, residual_out"):
        reports_of(tmp_path, NORM | more | {"reference": reference})


def test_each_result_has_the_limit_of_its_type(tmp_path: Path) -> None:
    """Scales are large integers beside small numbers: they are exact, and no measure of the numbers."""
    rows = {"shape": ["rows"], "dtype": "uint8"}
    outputs = {"y": {"shape": ["rows", "bytes"], "dtype": "bfloat16"}, "sf": rows,
               "z": {"shape": ["rows", "bytes"], "dtype": "float8_e4m3fn"}}  # fmt: skip
    reference = """def run(packed, scale, x, places=None):
    return x.bfloat16(), scale + 1, (x * 1.0).to(__import__("torch").float8_e4m3fn)
"""
    data = DUMP | {"outputs": outputs, "reference": reference}
    for old, new, status in (
        ("", "", 0), ("scale + 1", "scale + 2", 1), ("x.b", "(x * 1.2).b", 1), ("* 1.0", "* 1.001", 0),
        ("* 1.0", "* 1.3", 1),
    ):  # fmt: skip
        (report,) = reports_of(tmp_path, data, old, new)
        assert report.status == status, (new, [each.failure for each in report.failing])


def test_a_rotation_of_other_inputs_is_not_the_known_one(tmp_path: Path) -> None:
    rope = DEFINITIONS["rope"]
    inputs = {{"q": "query", "k": "key"}.get(name, name): each for name, each in rope["inputs"].items()}
    assert op_of(read_definition(written(tmp_path, "dump.json", rope | {"inputs": inputs})), None) is None
