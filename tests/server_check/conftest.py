from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.server.checks import Context
    from diptych.shared.tools.conformance.server.oracle import Oracle

if any(find_spec(name) is None for name in ("fastapi", "zmq", "httpx")):
    collect_ignore_glob = ["test_*.py"]  # a machine without the extra `server`
else:
    from tests.server_check.local_server import LocalServer, local_server


@pytest.fixture(scope="session")
def correct_server() -> Iterator["LocalServer"]:
    """tiny-dense in float32 with the reference panel, for all tests of the folder."""
    with local_server(panel="reference") as server:
        yield server


@pytest.fixture
def proxied(correct_server: "LocalServer") -> Iterator["LocalServer"]:
    """The same, for tests that plant a fault in its proxy: it is removed afterwards."""
    yield correct_server
    correct_server.proxy.plant(None)


@pytest.fixture(scope="session")
def oracle() -> "Oracle":
    from diptych.shared.tools.conformance.server.oracle import Oracle

    return Oracle("tiny-dense")


@pytest.fixture(scope="session")
def rounded_server() -> Iterator["LocalServer"]:
    """The same in bfloat16."""
    with local_server(panel="reference", dtype="bfloat16") as server:
        yield server


@pytest.fixture(scope="session")
def quick_context(correct_server: "LocalServer", oracle: "Oracle") -> Iterator["Context"]:
    """What `diptych check server --quick` works with, for the correct server."""
    yield from quick(correct_server, "float32", oracle)


@pytest.fixture(scope="session")
def rounded_context(rounded_server: "LocalServer", oracle: "Oracle") -> Iterator["Context"]:
    """The same, with the limits of bfloat16, for the server in bfloat16."""
    yield from quick(rounded_server, "bfloat16", oracle)


def quick(server: "LocalServer", dtype: str, oracle: "Oracle") -> Iterator["Context"]:
    from diptych.shared.tools.conformance.server.checks import QUICK
    from diptych.shared.tools.conformance.server.session import connect

    context = connect(server.url, "tiny-dense", dtype=dtype, limits=QUICK, oracle=oracle)
    yield context
    context.server.close()
