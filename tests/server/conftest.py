from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server for the tests that leave it as it was."""
    with serving(
        "--separate-process", "--max-running-requests", "32", "--max-total-tokens", "16384"
    ) as server:
        yield server
