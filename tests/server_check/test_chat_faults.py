"""Planted faults of chat, tools, schemas and single tokens are found; a correct server has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from diptych.shared.tools.conformance.server.checks import QUICK, Context, chosen, run_checks
from diptych.shared.tools.conformance.server.long_arguments import MOST_SLOWER, Timed
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.session import connect
from tests.planted import Bug
from tests.server_check.false_alarms import alarms, found_in
from tests.server_check.faults import load
from tests.server_check.local_server import LocalServer, local_server
from tests.server_check.tool_model.tool_folder import write_folder

_, CHAT = load()


@pytest.fixture(scope="module")
def tool_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, Context]]:
    """A server of the model that calls tools and thinks, and what --quick works with."""
    folder = str(write_folder(tmp_path_factory.mktemp("tools")))
    with local_server(panel="reference", model=folder) as server:
        context = connect(server.url, folder, dtype="float32", limits=QUICK, oracle=Oracle(folder))
        yield server, context
        context.server.close()


@CHAT.found_by(is_fast=lambda _, bug: bug.name == "one prompt token too many")
def test_the_check_of_a_fault_finds_it(tool_context: tuple[LocalServer, Context], bug: Bug) -> dict[str, str]:
    return found_in(*tool_context, bug)


def test_arguments_that_slow_down_differ_from_steady_ones() -> None:
    """Times are made up: a text that is read again at each token takes a time that grows with its square."""
    steady = Timed([(0.01 * n, n) for n in range(1, 1001)], "", [])
    read_again = Timed([(1e-5 * n * n, n) for n in range(1, 1001)], "", [])
    assert steady.slowdown() == pytest.approx(1.0, abs=0.05)
    assert read_again.slowdown() > MOST_SLOWER + 0.5
    assert read_again.slowdown(behind=0.02) < 1.0  # as slow as any call behind so many tokens


def offered(context: Context, names: list[str]) -> set[str]:
    context = replace(context, seed=1, answers=[], pairs=None, call_mode=None)
    results = list(run_checks(context, chosen(names)))
    assert alarms(results) == {}
    return {result.check.name for result in results if result.status in ("holds", "near tie")}


def test_a_correct_server_has_the_right_prompts(tool_context: tuple[LocalServer, Context]) -> None:
    names = ["prompt", "reasoning.history", "tools.without_tools", "semantics.unsupported"]
    assert len(offered(tool_context[1], names)) == 6


@pytest.mark.full
def test_a_correct_server_raises_no_alarm(tool_context: tuple[LocalServer, Context]) -> None:
    names = ["prompt", "tools", "reasoning", "schema", "seeded", "sampling.chat"]
    found = offered(tool_context[1], names)
    assert found == {check.name for check in chosen(names)}
