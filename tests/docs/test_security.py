"""The page on security: every attack of its table has tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"


def rows() -> list[list[str]]:
    text = PAGE.read_text("utf-8").partition("## Attacks and their tests")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines[2:] if not line[0].startswith("**")]


def test_every_attack_has_tests_that_exist() -> None:
    known = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    assert len(rows()) > 20
    for attack, _, tests in rows():
        names = re.findall(r"`(\w+)`", tests)
        assert names, attack
        assert set(names) <= known, attack
