"""The order of the GPU tests.

FlashInfer compiles a kernel when it is first needed, under a lock: workers that need the same one wait. So
tests of backends that may compile come last, when the others are done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

MAY_COMPILE = ("flashinfer", "fa3", "optimized")
"""Backends; the panel's own choice takes prompts to FA3."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_comes_last)


def _comes_last(item: pytest.Item) -> bool:
    params = getattr(item, "callspec", None)
    is_here = Path(__file__).parent in item.path.parents
    return is_here and params is not None and params.params.get("backend") in MAY_COMPILE
