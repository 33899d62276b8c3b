from collections.abc import Iterator
from importlib.util import find_spec

import pytest

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
