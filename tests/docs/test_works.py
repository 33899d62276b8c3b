"""What works where: records of tests on GPUs, the tables from them, and no page that says it by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.shared import registry
from docs.generators import record_gpu_tests, works
from docs.generators.measured import DATA
from tests.house.tree import ROOT, project_files

GPU = (
    r"(?:[HAB]\d00s?|(?:one|two|four|eight|several|\d+) (?:GPUs|cards)|an? (?:CUDA |NVIDIA )?GPU|NVIDIA \w+)"
)
RAN = r"(?:ran|runs?|tested|answer(?:s|ed)?|works?|worked|passed|supported|verified|checked|untested)"
CLAIMS = {
    rf"\b{RAN}\b[^.;:?|()]{{0,60}}? (?:on|by) [^.;:?|()]{{0,30}}\b{GPU}\b": "where something has run",
    r"\bboth panels (?:implement|have|support|work|run|accept)\b": "what both panels have",
    r"\bhas the same files\b|\bone file per panel\b|\bsmall enough to read\b": "what the tree does not hold",
}
"""Sentences that only the generated tables of works.md, or their marker `gpu-runs`, may say."""
ALLOWED = ("docs/works.md", "CHANGELOG.md")
FOLDERS = ("docs/lab/", "docs/measurements/")
"""The record of attempts, and pages whose figures come from recorded files."""
PAGES = [
    name.as_posix()
    for name in project_files()
    if name.suffix == ".md" and not name.as_posix().startswith(FOLDERS) and name.as_posix() not in ALLOWED
]


def sentences(markdown: str) -> str:
    """A page without code and comments, in one line."""
    text = re.sub(r"<!--.*?-->|^( *)(```|~~~).*?^\1\2", " ", markdown, flags=re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


def test_no_page_says_by_itself_where_something_has_run() -> None:
    texts = {page: sentences((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    found = [
        f"{page} says {what}: {match.group()!r}"
        for page, text in texts.items()
        for claim, what in CLAIMS.items()
        for match in re.finditer(claim, text, re.I)
    ]
    assert found == [], "say it by a marker: <!-- generate: gpu-runs ... -->, or link to works.md"


TWO, CLAUSES = "tests/gpu/test_two_gpus.py", "tests/conformance/test_contracts.py"
REPORT = f"""<testsuites><testsuite>
<testcase file="{TWO}" name="test_two_ranks_answer_as_one[graphs]"/>
<testcase file="{TWO}" name="test_two_ranks_answer_as_one[NCCL]"><failure/></testcase>
<testcase file="{CLAUSES}" name="test_clause[attention-flashinfer-a-clause-one]"/>
<testcase file="{CLAUSES}" name="test_clause[sampler-optimized-a-clause-one]"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A run that is recorded and shown: of two tests of two GPUs, one not, and of two clauses."""
    wanted = [(TWO, "test_two_ranks_answer_as_one", each) for each in ("NCCL]", "no graphs]")]
    wanted += [("tests/gpu/test_waits.py", "test_a_step_is_launched_without_waiting", "")]
    cases = [record_gpu_tests.Case(*each) for each in wanted]
    monkeypatch.setattr(record_gpu_tests, "collected", lambda: cases)
    monkeypatch.setattr(works, "DATA", tmp_path)
    works.records.cache_clear()
    (tmp_path / "report.xml").write_text(REPORT)
    run = {"card": "NVIDIA H100 80GB HBM3", "gpus": 2, "torch": "2.13.0", "commit": "5f9d2320"}
    record_gpu_tests.main([tmp_path / "report.xml"], **run, date="2026-11-28", folder=tmp_path)
    yield json.loads((tmp_path / "gpu-tests-H100-x2.json").read_text())
    works.records.cache_clear()


def test_a_record_counts_what_passed_failed_and_was_not_run(record: dict[str, Any]) -> None:
    assert record["files"] == {
        CLAUSES: {"test_clause": [1, 0, 1]},
        TWO: {"test_two_ranks_answer_as_one": [1, 1, 1]},
        "tests/gpu/test_waits.py": {"test_a_step_is_launched_without_waiting": [0, 0, 1]},
    }
    contracts = {"attention": {"flashinfer": [1, 0, 0]}, "sampler": {"optimized": [0, 0, 1]}}
    assert record["contracts"] == contracts


def test_tables_say_what_a_record_has_and_no_more(record: dict[str, Any]) -> None:
    card = "2 × H100 80GB HBM3 (torch 2.13.0, commit 5f9d2320, 2026-11-28)"
    assert works.gpu_cards() == f"The tests have run on {card}."
    notes = {
        "tests/gpu/test_two_gpus.py::test_two_ranks_answer_as_one": "ranks",
        "tests/gpu/test_waits.py": "waits",
    }
    *_, ranks, waits = (row for row in works.gpu_runs(notes).splitlines() if row.startswith("|"))
    assert ranks.endswith("| 1 passed, 1 failed, 1 not run on 2 × H100 80GB HBM3 |")
    assert waits == f"| waits | `tests/gpu/test_waits.py` | {works.NOT_YET} |"
    rows = works.works_components().splitlines()
    for name, ran in (("flashinfer", "1 passed"), ("fa3", works.NOT_YET)):
        (row,) = [row for row in rows if f"| `{name}` | CUDA GPU |" in row]
        assert row.endswith(f" `flashinfer-python`, `triton` | {ran} |")
    with pytest.raises(ValueError, match=r"no test tests/gpu/test_waits\.py::test_nothing"):
        works.gpu_runs({"tests/gpu/test_waits.py::test_nothing": ""})


def test_records_name_tests_and_implementations_of_this_tree() -> None:
    for path in DATA.glob("gpu-tests-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert set(record) == {"card", "gpus", "torch", "commit", "date", "files", "contracts"}
        assert set(record["contracts"]) <= set(registry.IMPLEMENTATIONS)
        assert all((ROOT / file).is_file() for file in record["files"])
