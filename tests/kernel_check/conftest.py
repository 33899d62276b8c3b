"""Functions under check run in forked processes, but for those that attack their checker."""

import sys
from collections.abc import Iterator

import pytest

from tests.conftest import HAS_GPU


@pytest.fixture(scope="module", autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        is_forked = not HAS_GPU and sys.platform == "linux"  # as in tests/conftest.py
        if is_forked and not request.node.name.endswith(("cheats.py", "timed_calls.py")):
            from tests.forked import FUNCTIONS

            patch.setattr("diptych.shared.tools.conformance.kernels.child_function.subprocess", FUNCTIONS)
        yield
