"""`diptych soak`: what it says at the end, and the exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from diptych.shared.tools.commands import soak as soak_command
from diptych.shared.tools.conformance.whole_engine import soak
from diptych.shared.tools.conformance.whole_engine.soak import Soak, Tally

Diptych = Callable[..., Result]

CPU = ("--device", "cpu", "--panel", "reference")


def test_one_round_is_repeated_and_counted(diptych: Diptych) -> None:
    result = diptych("soak", *CPU, "--seed", "4", "--seconds", "0", "--acts", "12")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("rounds: 1; ")
    assert not result.stdout.startswith("rounds: 1; 0 answers")


class Clock:
    """Advances with each question, slowly while requests are made, then fast."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.02 if self.now < 1 else 0.6
        return self.now


def test_time_limit_cuts_the_last_round(diptych: Diptych, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, progress is printed as lines."""
    clock = Clock()
    for module in (soak_command, soak):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(soak_command, "SECONDS_PER_LINE", 0.0)
    result = diptych("soak", *CPU, "--seconds", "2", "--acts", "100000")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("rounds: 1; ")
    assert "more answers not compared" in result.stdout
    assert "event 2 of 100000" in result.stderr
    assert " answers compared" in result.stderr


def test_rounds_in_which_nothing_was_asked_are_no_success(diptych: Diptych) -> None:
    result = diptych("soak", *CPU, "--seed", "-8", "--seconds", "0", "--acts", "5")
    assert result.exit_code == 2, result.output
    assert "rounds: 1" not in result.stdout
    assert "nothing was compared: no round of 5 acts had an answer" in result.stderr.splitlines()[-1]


def test_a_round_that_fails_says_how_to_repeat_it(diptych: Diptych, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_8(soak: Soak, seed: int, deadline: float, on_progress: object) -> Tally:
        assert seed != 8, "eight"
        return Tally(num_requests=1)

    monkeypatch.setattr(Soak, "round", fail_at_8)
    result = diptych("soak", *CPU, "--seed", "7")
    assert result.exit_code == 1, result.output
    assert "repeat it with --seed 8 --seconds 0" in result.stderr


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_seconds_must_have_an_end(diptych: Diptych, seconds: str) -> None:
    result = diptych("soak", "--model", "no-such-model", "--seconds", seconds)
    assert result.exit_code == 2
    assert result.stderr == f"error: --seconds must be finite and at least 0, got {float(seconds)}\n"


# ---- servers whose processes are killed ----


@pytest.mark.full  # in the fast cut, tests/server/test_faults.py kills processes
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes by their variables")
@pytest.mark.parametrize(
    ("seconds", "flags"),
    [
        ("0", ("--mode", "engine apart", "--seed", "1")),
        pytest.param("600", (), marks=pytest.mark.timeout(1500)),
    ],
    ids=["short", "every mode"],
)
def test_servers_whose_processes_are_killed(diptych: Diptych, seconds: str, flags: tuple[str, ...]) -> None:
    pytest.importorskip("fastapi")
    result = diptych("soak", "--server", "--seconds", seconds, *flags)
    assert result.exit_code == 0, result.output
    assert " right answers, " in result.stdout


def test_flags_of_servers_are_those_of_their_modes(diptych: Diptych) -> None:
    result = diptych("soak", "--server", "--dtype", "float32")
    assert result.exit_code == 2
    assert "--server has the flags of its modes; --dtype has no effect" in result.stderr
    result = diptych("soak", "--server", "--mode", "none")
    assert result.exit_code == 2
    assert "--mode must be one of one process, engine apart, dp" in result.stderr
