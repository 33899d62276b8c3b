"""Functions under check run in forked processes, but for those that attack their checker."""

from collections.abc import Iterator

import pytest

from tests.conftest import HAS_GPU


@pytest.fixture(scope="module", autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU and not request.node.name.endswith(("cheats.py", "timed_calls.py")):
            from tests.forked import FUNCTIONS

            patch.setattr("diptych.shared.tools.conformance.kernels.child_function.subprocess", FUNCTIONS)
        yield
