"""`diptych check`: verdicts, what a failure shows, and the exit status."""

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import Result

from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, clauses_of

Diptych = Callable[..., Result]

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'docs' / 'examples' / 'my_radix_cache.py'}:MyRadixCache"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def plant(folder: Path, code: str) -> str:
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(code))
    return str(file)


# ---- what holds ----


def test_the_reference_holds_and_every_clause_has_its_line(diptych: Diptych) -> None:
    result = diptych("check", "prefill_adder", "reference")
    assert result.exit_code == 0, result.output
    clauses = clauses_of("prefill_adder")
    for clause in clauses:
        count = f"{len(clause.cases)}/{len(clause.cases)}"
        assert any(clause.name in line and count in line for line in result.stdout.splitlines())
    num_cases = 1 + sum(len(clause.cases) for clause in clauses)
    summary = f"all {len(clauses) + 1} clauses hold, in {num_cases} cases"
    assert result.stdout.splitlines()[0] == summary  # the table after it may be long


@pytest.mark.full
def test_the_example_of_the_documentation_holds(diptych: Diptych) -> None:
    result = diptych("check", "radix_cache", EXAMPLE)
    assert result.exit_code == 0, result.output
    assert f"all {len(clauses_of('radix_cache')) + 1} clauses hold" in result.stdout


def test_single_clauses(diptych: Diptych) -> None:
    result = diptych(
        "check", "layers", "diptych.reference.layers", "--clause", "slices", "--clause", "no-tokens"
    )
    assert result.exit_code == 0, result.output
    assert "all 3 clauses hold" in result.stdout


def test_list_without_a_component_fits_a_screen(diptych: Diptych) -> None:
    result = diptych("check", "--list")
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert all(re.search(rf"\b{name} \d", result.output) for name in CONTRACTS)
    assert all(f"check {name}" in result.output for name in ("kernel", "server", "engine"))


@pytest.mark.parametrize("component", CONTRACTS)
def test_list_shows_the_sentences(diptych: Diptych, component: str) -> None:
    result = diptych("check", component, "--list")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.replace("│", " ").split())
    for clause in clauses_of(component):
        assert clause.name in text
        assert clause.statement.split()[0] in text


HALF_ONLY = """
    from diptych.reference.attention import TorchAttention

    class HalfOnly(TorchAttention):
        def run(self, q, layer, plan, **kv):
            if layer.sliding_window >= 0:
                raise ValueError("sliding_window is not supported")
            return super().run(q, layer, plan, **kv)
"""


def test_what_is_refused_is_shown(diptych: Diptych, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    target = f"{plant(tmp_path, HALF_ONLY)}:HalfOnly"
    result = diptych("check", "attention", target, "--clause", "sliding-window", "--json", str(file))
    assert result.exit_code == 0, result.output
    verdict = next(each for each in json.loads(file.read_text())["clauses"] if each["refusals"])
    num_cases = len(verdict["refusals"])
    assert num_cases > 0
    assert f"{num_cases} cases are refused, which the contract allows:" in result.stdout
    assert (verdict["num_held"], verdict["num_refused"]) == (0, num_cases)
    assert result.stdout.startswith(f"all 2 clauses hold, in 1 cases; {num_cases} are refused")
    (row,) = (line for line in result.stdout.splitlines() if "sliding-window" in line)
    assert f" 0/{num_cases} │ refused " in row
    assert f"{num_cases} x sliding_window is not supported" in result.stdout
    held = diptych("check", "attention", "reference", "--clause", "sliding-window")
    assert "refused" not in held.stdout


PAGES_ONLY = """
    from diptych.reference.attention import TorchAttention

    class FewWindows(TorchAttention):
        def run(self, q, layer, plan, **kv):
            if layer.sliding_window > 20:
                raise ValueError("sliding_window above 20 is not supported")
            return super().run(q, layer, plan, **kv)
"""


def test_a_clause_of_which_a_part_is_refused(diptych: Diptych, tmp_path: Path) -> None:
    target = f"{plant(tmp_path, PAGES_ONLY)}:FewWindows"
    result = diptych("check", "attention", target, "--clause", "sliding-window")
    assert result.exit_code == 0, result.output
    (row,) = (line for line in result.stdout.splitlines() if "sliding-window" in line)
    found = re.search(r" (\d+)/(\d+) │ holds, (\d+) refused ", row)
    assert found is not None
    num_held, num_cases, num_refused = map(int, found.groups())
    assert 0 < num_held == num_cases - num_refused < num_cases


# ---- what is interrupted ----


@pytest.mark.parametrize("num_beyond", [-1, 0, 1], ids=["within the last", "at its end", "in the next"])
def test_an_interrupt_keeps_the_finished_clauses(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_beyond: int
) -> None:
    clauses = [clause for clause in clauses_of("prefill_adder") if len(clause.cases) > 1][:3]
    options = [option for clause in clauses for option in ("--clause", clause.name)]
    num_verdicts = 1 + sum(len(clause.cases) for clause in clauses[:2]) + num_beyond
    check_component = suite.check_component

    def interrupted(*arguments: str, **options: object) -> Iterator[suite.Verdict]:
        yield from islice(check_component(*arguments, **options), num_verdicts)
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "check_component", interrupted)
    file = tmp_path / "verdicts.json"
    result = diptych("check", "prefill_adder", "reference", *options, "--json", str(file))
    assert result.exit_code == 130, result.output
    num_finished = 2 if num_beyond < 0 else 3
    assert f"interrupted after {num_finished} of 4 clauses" in result.stdout
    assert result.stdout.startswith(f"the first {num_finished} clauses hold")
    data = json.loads(file.read_text())
    assert (data["is_interrupted"], data["holds"]) == (True, False)
    names = [clause["name"] for clause in data["clauses"]]
    assert names[1:] == [clause.name for clause in clauses[: num_finished - 1]]


def test_an_interrupt_keeps_a_clause_that_has_failed(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_component = suite.check_component

    def interrupted(*arguments: str, **options: object) -> Iterator[suite.Verdict]:
        for verdict in check_component(*arguments, **options):
            yield verdict
            if not verdict.holds:
                raise KeyboardInterrupt

    monkeypatch.setattr(suite, "check_component", interrupted)
    options = ["--clause", "locks-count-along-the-path", "--clause", "any-calls", "--no-shrink"]
    result = diptych("check", "radix_cache", f"{plant(tmp_path, BROKEN)}:Broken", *options)
    assert result.exit_code == 130, result.output
    assert "1 of 2 clauses fail" in result.stdout
    assert "interrupted after 2 of 3 clauses" in result.stdout
    assert "each could take as long" not in result.stdout


# ---- what fails ----

BROKEN = f"""
    import sys
    sys.path.insert(0, {str(ROOT / "docs" / "examples")!r})
    from my_radix_cache import MyRadixCache

    class Broken(MyRadixCache):
        def inc_lock_ref(self, node):
            for each in self._path(node)[-1:]:  # the node alone, not the path above it
                each.lock_ref += 1
"""


def test_a_broken_variant_fails_with_the_smallest_case(diptych: Diptych, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    clauses = ["locks-count-along-the-path", "whole-pages", "any-calls"]
    options = [option for clause in clauses for option in ("--clause", clause)]
    target = f"{plant(tmp_path, BROKEN)}:Broken"
    result = diptych("check", "radix_cache", target, *options, "--json", str(file))
    assert result.exit_code == 1, result.output
    text = result.stdout
    for expected in (
        "A lock applies to the path from its node up to the root.",
        "smallest input",
        "expected",
        "got",
        "2 of 4 clauses fail",
    ):
        assert expected in text
    data = json.loads(file.read_text())
    assert (data["component"], data["target"], data["holds"]) == ("radix_cache", target, False)
    assert not data["is_interrupted"]
    by_name = {clause["name"]: clause for clause in data["clauses"]}
    assert by_name["whole-pages"]["failures"] == []
    assert by_name["whole-pages"]["num_held"] == by_name["whole-pages"]["num_cases"]
    (failure,) = by_name["locks-count-along-the-path"]["failures"]
    assert failure["expected"] != failure["actual"]
    any_calls = by_name["any-calls"]
    assert any_calls["num_held"] + len(any_calls["failures"]) == any_calls["num_cases"]
    first = any_calls["failures"][0]
    assert first["smallest_case"]["calls"].count("Call(") < first["case"]["calls"].count("Call(")
    assert f"policy = {first['smallest_case']['policy']}" in text
    assert "calls[0] = Call(" in text


def test_without_shrinking_the_case_stays(diptych: Diptych, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    target = f"{plant(tmp_path, BROKEN)}:Broken"
    options = ["--clause", "any-calls", "--no-shrink", "--json", str(file)]
    assert diptych("check", "radix_cache", target, *options).exit_code == 1
    for failure in json.loads(file.read_text())["clauses"][1]["failures"]:
        assert failure["case"] == failure["smallest_case"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Mine: ...", "Mine is no subclass of diptych.shared.interfaces.Sampler and lacks sample"),
        ("from diptych.shared.interfaces import Sampler\nclass Mine(Sampler): ...", "Mine lacks sample"),
        ("def Mine(): ...", "Mine is no class"),
    ],
)
def test_what_is_no_implementation_is_one_clear_line(
    diptych: Diptych, tmp_path: Path, code: str, message: str
) -> None:
    result = diptych("check", "sampler", f"{plant(tmp_path, code)}:Mine")
    assert result.exit_code == 1, result.output
    assert message in result.stdout
    assert "1 of 1 clauses fail" in result.stdout
    assert "Traceback" not in result.output
    assert ("diptych check kernel FILE.py:NAME --like OPERATION" in result.stdout) == ("def" in code)


def test_an_operation_is_no_component(diptych: Diptych) -> None:
    result = diptych("check", "rms_norm", "mine.py:f")
    assert result.exit_code == 2
    assert "rms_norm is an operation, not a component" in result.output
    assert "diptych check kernel FILE.py:NAME --like rms_norm" in result.output


def test_a_class_is_missing_in_a_module_or_in_its_place(diptych: Diptych, tmp_path: Path) -> None:
    result = diptych("check", "layers", plant(tmp_path, "from diptych.reference.layers import RMSNorm"))
    assert result.exit_code == 1
    assert "has no RotaryEmbedding; it must hold RMSNorm, RotaryEmbedding, SiluAndMul" in result.stdout
    result = diptych("check", "sampler", "diptych.reference.sampler")
    assert result.exit_code == 1
    assert "name the class in it, diptych.reference.sampler:Class" in result.stdout


HANGING = """
    from diptych.reference.schedule_policy import SchedulePolicy

    class Mine(SchedulePolicy):
        def order(self, waiting_queue, running):
            while True:
                pass
"""


def test_a_hanging_implementation_is_a_failure(diptych: Diptych, tmp_path: Path) -> None:
    clauses = [clause for clause in clauses_of("schedule_policy") if len(clause.cases) > 1]
    target = f"{plant(tmp_path, HANGING)}:Mine"
    options = ["--clause", clauses[0].name, "--time-limit", "0.1"]
    result = diptych("check", "schedule_policy", target, *options)
    assert result.exit_code == 1, result.output
    assert "an end within 0.1 s" in result.stdout
    assert f"{len(clauses[0].cases) - 1} more cases: each could take as long" in result.stdout


@pytest.mark.parametrize("wish", ["raise SystemExit(0)", "raise KeyError('seed')"])
def test_whatever_it_raises_is_its_failure(diptych: Diptych, tmp_path: Path, wish: str) -> None:
    code = f"""
        from diptych.reference.schedule_policy import SchedulePolicy

        class Mine(SchedulePolicy):
            def order(self, waiting_queue, running):
                {wish}
    """
    target = f"{plant(tmp_path, code)}:Mine"
    clause = clauses_of("schedule_policy")[0].name
    result = diptych("check", "schedule_policy", target, "--clause", clause)
    assert result.exit_code == 1, result.output
    assert f"{wish[6:].split('(')[0]}: " in result.stdout
    assert "mine.py:6, in order" in "".join(result.stdout.split("\n"))


# ---- what cannot be checked ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_component", "reference"], "there are contracts for schedule_policy, prefill_adder"),
        (["sampler", "no-such-panel"], "choose one of reference"),
        (["sampler"], "name an implementation of sampler"),
        (["sampler", "no_such_file.py:Sampler"], "no such file: no_such_file.py"),
        (["sampler", "no_such_module.at_all:Sampler"], "no module named"),
        (["sampler", "diptych.reference.sampler:NoSuchClass"], "has no 'NoSuchClass'"),
        (["sampler", "reference", "--clause", "no-such-clause"], "the clauses are "),
        (["sampler", "reference", "--json", "no/such/folder/x.json"], "for x.json"),
        (["sampler", "reference", "--json", "."], ". is a folder: name a file in it"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(diptych: Diptych, arguments: list[str], message: str) -> None:
    result = diptych("check", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_a_file_that_cannot_be_imported_is_one_line(diptych: Diptych, tmp_path: Path) -> None:
    result = diptych("check", "sampler", f"{plant(tmp_path, 'class Mine(:')}:Mine")
    assert result.exit_code == 2
    assert "cannot load" in result.stderr
    assert "SyntaxError" in result.stderr
