from collections.abc import Callable

import pytest
from fake_engine import FakeLLM
from typer.testing import CliRunner, Result

from diptych.shared.tools.cli import app
from diptych.shared.tools.commands import launch


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory is read, and small matrices are multiplied: the figures do not matter here."""
    from diptych.shared.tools.bench import ceilings

    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 16 * ceilings.MIB)
    monkeypatch.setitem(ceilings.MATRIX_SIZE, "cpu", 128)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Takes the engine's place; its `flags` are what a command started it with."""
    llm = FakeLLM()

    def start(flags: dict[str, object]) -> FakeLLM:
        llm.flags = flags  # type: ignore[attr-defined]
        return llm

    monkeypatch.setattr(launch, "start_llm", start)
    return llm


@pytest.fixture
def diptych() -> Callable[..., Result]:
    """Run the command in this process: diptych("generate", "Hello", input="...")."""

    def run(*arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=input, prog_name="diptych")

    return run
