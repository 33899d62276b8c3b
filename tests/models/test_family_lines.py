"""The lines of code of each family in docs/models.md."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from diptych.optimized import models as optimized
from diptych.reference import models as reference
from diptych.shared.config import families

TREE = ast.parse(Path(families.__file__).read_text(encoding="utf-8"))
ASSIGNED = {node.targets[0].id: node.value for node in TREE.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`\w+ForCausalLM`(?:, `\w+`)*) \| (\d+) \|$", TEXT, re.MULTILINE)


def row_of(node: ast.expr) -> set[int]:
    """Its lines, and those of the rows that it is made of."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    parts = [row_of(ASSIGNED[name]) for name in names if name in ASSIGNED]
    return set(range(node.lineno, (node.end_lineno or 0) + 1)).union(*parts)


def num_lines(architectures: list[str]) -> int:
    rows = ASSIGNED["FAMILIES"]
    assert isinstance(rows, ast.Dict)
    nodes = {ast.literal_eval(key): value for key, value in zip(rows.keys, rows.values) if key}
    found: set[object] = set().union(*(row_of(nodes[name]) for name in architectures))
    for name in architectures:
        parts = [families.FAMILIES[name].more]
        for panel in (reference, optimized):
            model = panel.model_class(name)
            classes = (model, model.layer_class, model.layer_class.attention_class)  # type: ignore[attr-defined]
            bases = {base for each in classes for base in each.__mro__}
            parts += [base for base in bases if base.__module__.startswith(panel.__name__ + ".")]
        for part in filter(None, parts):
            lines, start = inspect.getsourcelines(part)
            found |= {(part.__module__, start + i) for i, line in enumerate(lines) if line.strip()}
    return len(found)


@pytest.mark.parametrize(("names", "number"), ROWS)
def test_lines(names: str, number: str) -> None:
    assert num_lines(re.findall(r"\w+", names)) == int(number)


def test_a_row_for_each() -> None:
    assert len(ROWS) == 7


def test_the_files_of_gemma4() -> None:
    files = [*ROOT.glob("*/*/gemma4_*.py"), ROOT / "shared/config/hf_gemma4.py"]
    number = sum(bool(line.strip()) for path in files for line in path.read_text().splitlines())
    assert f"The family took a row and {number} lines" in TEXT
