"""A sheet to print for each stage, linked from its page, complete, and on one page of paper."""

from pathlib import Path
from typing import Any

import pytest

from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage
from docs.figures import sheets
from tests.browser import chromium, needs_chromium

each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.number)


@each_stage
def test_it_is_linked_and_complete(stage: Stage) -> None:
    link = f"](sheets/{stage.number}.html)"
    assert link in (sheets.COURSE / stage.page).read_text(encoding="utf-8")
    assert link in (sheets.COURSE / "index.md").read_text(encoding="utf-8")
    page = sheets.page(stage.number)
    for heading in ("By hand", "Shapes", "Invariants", "Costs"):
        assert f"<h2>{heading}</h2>" in page
    has_picture = "docs/figures/" in (sheets.COURSE / stage.page).read_text(encoding="utf-8")
    assert ("<h2>Picture</h2>" in page) == ('<figure class="picture' in page) == has_picture
    assert len(sheets.sheets()[stage.number]["invariants"]) >= 4
    assert len(sheets.sheets()[stage.number]["costs"]) >= 3


@needs_chromium
@pytest.mark.full
def test_each_fits_its_page(tmp_path: Path) -> None:
    file = tmp_path / "all.html"
    file.write_text(sheets.page(sheets.ALL), encoding="utf-8")
    with chromium() as driver:
        driver.get(file.as_uri())
        sizes: list[Any] = driver.execute_script(
            "return [...document.querySelectorAll('section')].map((each) => [each.id,"
            " each.scrollHeight <= each.clientHeight, each.scrollWidth <= each.clientWidth])"
        )
    assert sizes == [[f"s{stage.number}", True, True] for stage in STAGES]
