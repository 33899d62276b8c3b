"""`--list` of each check fits a screen, and runs nothing."""

from collections.abc import Callable

import pytest
from typer.testing import Result

Diptych = Callable[..., Result]

LISTS = {
    "kernel": ("attention.decode", "all_reduce"),
    "server": ("scoring", "tools", "schema"),
    "engine": ("KL divergence", "prefix cache invariance", "attention"),
}
"""Command -> words that its list has."""
SCREEN = 24, 80


@pytest.fixture(autouse=True)
def _screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))


@pytest.mark.parametrize("command", [pytest.param("kernel", marks=pytest.mark.full), "server", "engine"])
def test_lists_fit_a_screen(diptych: Diptych, command: str) -> None:
    result = diptych("check", command, "--list")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert 4 < len(lines) < SCREEN[0]
    assert all(len(line.rstrip()) <= SCREEN[1] for line in lines)
    assert all(word in result.stdout for word in LISTS[command])


def test_the_checks_of_a_group_are_listed(diptych: Diptych) -> None:
    result = diptych("check", "server", "--list", "--only", "reasoning")
    assert "reasoning.apart" in result.stdout
    assert "Reasoning is in a field of its own" in result.stdout
    assert "tools." not in result.stdout


@pytest.mark.parametrize("command", ["server", "engine"])
def test_without_arguments_the_list_is_named(diptych: Diptych, command: str) -> None:
    result = diptych("check", command)
    assert result.exit_code == 2
    assert "--list" in result.output
