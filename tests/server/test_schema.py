"""Random requests from the OpenAPI schema, valid and invalid: no answer is a 500."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error

from tests.properties import HealthCheck, given, seed, settings
from tests.server.running import RunningServer, serving
from tests.server.test_faults import assert_whole

PAUSE = "/pause_generation"
"""It stops the engine, so the engine is continued behind each request."""


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    """Requests of this test abort those of others."""
    sizes = ("--max-total-tokens", "4096", "--max-running-requests", "16", "--context-len", "96")
    with serving("--separate-process", *sizes) as server:
        yield server


def operations(url: str) -> dict[str, schemathesis.APIOperation]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        found[f"{operation.method.upper()} {operation.path}"] = operation
    return found


def try_all(url: str, max_examples: int, number: int | None) -> None:
    found = operations(url)
    assert "POST /v1/chat/completions" in found
    for path in ("/v1/messages", "/abort_request", PAUSE):
        assert found[f"POST {path}"].body, path
    for operation in found.values():
        for mode in schemathesis.GenerationMode:

            @settings(
                max_examples=max_examples,
                derandomize=number is None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=[not_a_server_error], timeout=60)
                if case.operation.path == PAUSE:
                    httpx.post(f"{url}/continue_generation", timeout=60).raise_for_status()

            with contextlib.suppress(Unsatisfiable):  # a route without parameters has no invalid request
                (one if number is None else seed(number)(one))()


@pytest.mark.parametrize(
    ("max_examples", "number"), [(1, None), *(pytest.param(25, n, marks=pytest.mark.full) for n in range(12))]
)
def test_no_answer_is_a_500(own_server: RunningServer, max_examples: int, number: int | None) -> None:
    """`number`: the seed of the cases."""
    try_all(own_server.url, max_examples, number)
    assert_whole(own_server)
