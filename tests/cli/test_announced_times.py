"""Checks end within the time that they announce, with the verdict on what was done. Clocks are simulated."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from diptych.shared.tools.commands import check_engine
from diptych.shared.tools.commands.announced import Announced
from diptych.shared.tools.conformance.clauses.time_limit import GRACE, TimeLimitExceeded
from diptych.shared.tools.conformance.server import checks
from diptych.shared.tools.conformance.server.checks import Check, Finding, run_checks
from diptych.shared.tools.conformance.server.checks import Result as Found
from diptych.shared.tools.conformance.server.client import Server, Unreachable
from diptych.shared.tools.conformance.server.verdict import Report
from diptych.shared.tools.conformance.whole_engine import engine_gate
from diptych.shared.tools.conformance.whole_engine.engine_gate import Gate

Diptych = Callable[..., Result]
HOLDS = Finding("holds")
SLOW = """
import time

def never(x):
    time.sleep(3600)

def slow(x):
    time.sleep(0.3)
    a, b = x.float().chunk(2, -1)
    return (a * a.sigmoid() * b).to(x.dtype)
"""


def test_the_time_is_announced_and_a_late_end_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    end = Announced("3 cases", 50.0, 7, clock=lambda: now[0])
    assert capsys.readouterr().err == "3 cases; the check ends within 50 s; --seed 7 repeats it\n"
    assert end.ends_at == 145.0
    now[0] = 150.0
    assert end.late == []
    now[0] = 170.0
    assert "took 70 s, 20 s more than announced" in end.late[0]


def report_of(results: list[Found], num_chosen: int) -> Report:
    offers: Any = SimpleNamespace(scoring=True)
    return Report({}, offers, results, num_chosen, is_over=True)


def test_checks_of_a_server_end_with_the_verdict_on_those_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checks, "until", lambda ends_at: None)

    def late(context: Any) -> Iterator[Finding]:
        yield HOLDS
        now[0] = 11.0
        raise Unreachable("the time of the check is over")

    chosen = [Check("api.one", "", "", lambda _: HOLDS), Check("api.two", "", "", late),
              Check("api.three", "", "", lambda _: HOLDS)]  # fmt: skip
    context: Any = SimpleNamespace(seed=0, server=SimpleNamespace(ends_at=10.0), progress=lambda name: None)
    results = list(run_checks(context, chosen))
    assert [each.check.name for each in results] == ["api.one"]
    report = report_of(results, 3)
    assert report.sentence.endswith("1 checks hold, in 1 cases; 2 checks did not run: the time is over")
    assert report.exit_status == 2


def test_a_check_of_a_server_that_does_not_end_is_interrupted() -> None:
    def never(context: Any) -> Finding:
        time.sleep(3600)
        return HOLDS

    ends_at = time.monotonic() - GRACE + 0.05
    context: Any = SimpleNamespace(
        seed=0, server=SimpleNamespace(ends_at=ends_at), progress=lambda name: None
    )
    assert list(run_checks(context, [Check("api.never", "", "", never)])) == []


def test_no_request_is_sent_after_the_end() -> None:
    server = Server("http://127.0.0.1:9", ends_at=time.monotonic() - 1.0)
    with pytest.raises(Unreachable, match="the time of the check is over"):
        server.complete("a")
    server.close()


def test_gates_of_an_engine_that_no_time_is_left_for_are_not_run(
    diptych: Diptych, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gates(*_: Any) -> Iterator[Gate]:
        yield Gate("KL divergence", 0.0, 0.0, 0.0, 0.0, 1.0)
        raise TimeLimitExceeded

    monkeypatch.setattr(engine_gate, "_gates", gates)
    monkeypatch.setattr(check_engine, "prompts_of", lambda *_: [[1], [2]])
    result = diptych("check", "engine", "optimized", "--within", "5", "--num-prompts", "2")
    assert result.exit_code == 2, result.output
    assert "1 gates hold, at 64 tokens of 2 prompts; 3 are not run: the time is over" in result.stdout
    assert "4 gates of optimized; the check ends within 5 s" in result.output


@pytest.mark.full
@pytest.mark.parametrize("name", ["slow", "never"])
def test_a_slow_kernel_gets_the_verdict_on_what_was_done(diptych: Diptych, tmp_path: Path, name: str) -> None:
    (tmp_path / "f.py").write_text(SLOW)
    target = f"{tmp_path / 'f.py'}:{name}"
    result = diptych("check", "kernel", target, "--like", "silu_and_mul", "--within", "8", "--seed", "1")
    assert result.exit_code == 2, result.output
    assert "the time of the check" in result.output  # where a process starts slowly: of its start
    assert "the check ends within 8 s" in result.output


def test_a_module_that_is_never_loaded_is_refused(diptych: Diptych, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("import time\ntime.sleep(3600)\n")
    target = f"{tmp_path / 'f.py'}:never"
    result = diptych("check", "kernel", target, "--like", "silu_and_mul", "--within", "2", "--seed", "1")
    assert result.exit_code == 2, result.output
    assert f"{target} is not loaded within" in " ".join(result.output.split())
    assert "Traceback" not in result.output
