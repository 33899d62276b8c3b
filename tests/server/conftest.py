from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.server.running import RunningServer, serving

if any(find_spec(name) is None for name in ("fastapi", "zmq", "httpx", "openai")):
    collect_ignore_glob = ["test_*.py"]  # a machine without the extra `server`


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server for the tests that leave it as it was."""
    with serving(
        "--separate-process",
        "--max-running-requests",
        "32",
        "--max-total-tokens",
        "16384",
        "--tool-call-parser",
        "hermes",
    ) as server:
        yield server


@pytest.fixture(scope="session")
def locked_server() -> Iterator[RunningServer]:
    """One that asks for one of two API keys, or an admin key, and writes the request log."""
    keys = ("--api-key", "secret", "--api-key", "other", "--admin-key", "root")
    with serving(*keys, "--log-requests") as server:
        yield server
