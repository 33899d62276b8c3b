"""The pytest plugin: each clause and case of a component's contract is a test.

    pytest --diptych my_cache.py:MyRadixCache --component radix_cache

    [tool.pytest.ini_options]  # checked by plain `pytest`
    diptych = ["radix_cache my_cache.py:MyRadixCache 1.0"]

Where Diptych is installed, pytest loads this module at every start. So it imports torch and the contracts
only when a component is collected.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.clauses.clause import Clause


class Checked(NamedTuple):
    component: str
    target: str
    contract: str  # the version that the target was written for; empty: not given
    folder: str  # the folder of relative file names


CHECKED = pytest.StashKey[list[Checked]]()


class OlderContractWarning(pytest.PytestWarning):
    """A component was written for an older version of its contract."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("diptych", "components held to the contracts of Diptych")
    group.addoption(
        "--diptych", action="append", default=[], metavar="TARGET", help="module:Class or file.py:Class"
    )
    group.addoption(
        "--component",
        action="append",
        default=[],
        dest="diptych_component",
        metavar="NAME",
        help="what the target implements, as radix_cache; one for each --diptych, in the same order",
    )
    group.addoption(
        "--diptych-contract",
        action="append",
        default=[],
        metavar="VERSION",
        help="version of the contract that the target was written for, as 1.0; one for each --diptych",
    )
    group.addoption("--diptych-clause", action="append", default=[], metavar="NAME", help="only this clause")
    group.addoption("--diptych-no-shrink", action="store_true", help="keep the first input that fails")
    group.addoption(
        "--diptych-time-limit", type=float, default=30.0, metavar="SECONDS", help="for one case (default 30)"
    )
    parser.addini("diptych", "lines: component target [contract version]", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.option.diptych_time_limit
    if not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"--diptych-time-limit must be a number of seconds above 0, got {seconds}")
    named = _from_options(config)
    has_paths = config.args_source == config.ArgsSource.ARGS
    if named and not has_paths:
        config.args = []  # no tests but these
    config.stash[CHECKED] = named if named or has_paths else _from_settings(config)
    for each in config.stash[CHECKED]:
        _check_version(config, each)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"diptych: {each.component} {each.target}" for each in config.stash[CHECKED]]


@pytest.hookimpl(tryfirst=True)  # before pytest selects with -k and -m
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    for each in session.config.stash[CHECKED]:
        name = f"{each.component}={each.target}"
        collector = Contract.from_parent(session, name=name, nodeid=name, checked=each)
        items += session.genitems(collector)


def _from_options(config: pytest.Config) -> list[Checked]:
    targets, components = config.option.diptych, config.option.diptych_component
    versions = config.option.diptych_contract or [""] * len(targets)
    if len(components) < len(targets):
        from diptych.shared.tools.conformance.clauses.contract_versions import recorded

        raise pytest.UsageError(
            f"--diptych {targets[len(components)]}: add --component NAME, one of {', '.join(recorded())}"
        )
    if not len(targets) == len(components) == len(versions):
        raise pytest.UsageError(
            f"each --diptych needs one --component, and one --diptych-contract or none has any: got "
            f"{len(targets)} targets, {len(components)} components, {len(config.option.diptych_contract)} "
            f"versions"
        )
    folder = str(config.invocation_params.dir)
    return [Checked(*each, folder) for each in zip(components, targets, versions)]


def _from_settings(config: pytest.Config) -> list[Checked]:
    found = []
    for line in config.getini("diptych"):
        words = line.split()
        if len(words) not in (2, 3):
            raise pytest.UsageError(
                f"a line of diptych is: component target [contract version], got {line!r}"
            )
        component, target, version = [*words, ""][:3]
        found.append(Checked(component, target, version, str(config.rootpath)))
    return found


def _check_version(config: pytest.Config, checked: Checked) -> None:
    from diptych.shared.tools.conformance.clauses.contract_versions import older_than_current

    try:
        note = older_than_current(checked.component, checked.contract)
    except ValueError as error:
        raise pytest.UsageError(_with_hint(str(error), checked.component)) from None
    is_worker = hasattr(config, "workerinput")  # of xdist: its controller has warned
    if note and not is_worker:
        config.issue_config_time_warning(OlderContractWarning(note), stacklevel=2)


def _with_hint(message: str, component: str) -> str:
    from diptych.shared.tools.conformance.clauses.contract_versions import recorded

    if component in recorded():  # the version is unknown, not the component
        return message
    from diptych.shared.tools.commands.check import with_kernel_hint

    return with_kernel_hint(message, component)


class Contract(pytest.Collector):
    """The clauses of one component, against one target."""

    def __init__(self, checked: Checked, **node: Any) -> None:
        super().__init__(**node)
        self.checked = checked
        self.failed: set[str] = set()  # clauses whose first failing case is known: only that one is shrunk
        self.late: set[str] = set()  # clauses that ran into the time limit: each case could take as long

    def collect(self) -> Iterator[Case]:
        """The clause of the interface first; if it fails, no other clause can run."""
        from diptych.shared import registry
        from diptych.shared.engine.build.component_check import problem_with
        from diptych.shared.tools.commands.check import chosen_clauses
        from diptych.shared.tools.conformance.clauses import suite
        from diptych.shared.tools.conformance.clauses.device import check_device

        component, target, _, folder = self.checked
        target = _absolute(target, folder)
        try:
            clauses = chosen_clauses(suite.clauses_of(component), self.config.option.diptych_clause)
            registry.check_choice(component, target)
            registry.check_device({component: target}, check_device().type)
            self.implementation = registry.load(component, target)
        except ValueError as error:
            raise self.CollectError(str(error)) from error
        self.reference = registry.load(component, "reference")
        is_whole = problem_with(component, self.implementation) is None
        for clause in [suite.interface_clause(component), *(clauses if is_whole else [])]:
            for case in clause.cases:
                name = str(getattr(case, "name", case)).replace(" ", "_")
                yield Case.from_parent(self, name=f"{clause.name}[{name}]", clause=clause, case=case)


class Case(pytest.Item):
    """One case of a clause. A case that the target refuses, as its contract allows, is skipped."""

    def __init__(self, clause: Clause, case: Any, **node: Any) -> None:
        super().__init__(**node)
        self.clause, self.case = clause, case
        self.user_properties.append(("clause", clause.statement))

    def runtest(self) -> None:
        from diptych.shared.tools.commands.check import function_hint
        from diptych.shared.tools.commands.check_results import gather, refusals_beside
        from diptych.shared.tools.conformance.clauses.suite import check_implementation

        contract, option = self.parent, self.config.option
        assert isinstance(contract, Contract)
        if self.clause.name in contract.late:
            pytest.skip(f"{self.clause.name} reached the time limit in another case")
        verdicts = check_implementation(
            [self.clause.with_cases([self.case])],
            contract.implementation,
            contract.reference,
            shrink_failures=not option.diptych_no_shrink and self.clause.name not in contract.failed,
            time_limit=option.diptych_time_limit,
        )
        (result,) = gather(refusals_beside(verdicts))
        for verdict in result.failures:
            assert verdict.failure is not None
            contract.failed.add(self.clause.name)
            if verdict.failure.what == "time limit":
                contract.late.add(self.clause.name)
            raise ClauseFails(result, function_hint(contract.implementation))
        if result.refusals:
            pytest.skip("; ".join(dict.fromkeys(result.refusals)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, ClauseFails):
            return super().repr_failure(excinfo, style)
        return excinfo.value.text()

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class ClauseFails(Exception):
    """`result`: a `diptych.shared.tools.commands.check_results.Result` with one failing case. `hint`: how to
    check a bare function; empty for others."""

    def __init__(self, result: Any, hint: str) -> None:
        super().__init__(result.clause.name)
        self.result = result
        self.hint = hint

    def text(self) -> str:
        """What `diptych check` prints."""
        from rich.console import Console

        from diptych.shared.tools.commands.check_results import print_failure

        stream = io.StringIO()
        print_failure(Console(file=stream), self.result)
        return "\n".join(line.rstrip() for line in (*stream.getvalue().splitlines(), self.hint)).rstrip()


def _absolute(target: str, folder: str) -> str:
    """The target with an absolute file name; a module is also searched for in the folder."""
    module, colon, name = target.partition(":")
    if module.endswith(".py"):
        return f"{Path(folder, module)}{colon}{name}"
    if folder not in sys.path:
        sys.path.append(folder)
    return target
