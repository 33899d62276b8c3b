"""The order of the GPU tests.

FlashInfer compiles a kernel on first use, under a lock, and other workers that need it wait. So tests of
backends that may compile run last.
"""

from __future__ import annotations

from pathlib import Path

import pytest

MAY_COMPILE = ("flashinfer", "fa3", "optimized")
"""Tests of backends that compile; the default backend uses FA3 for prompts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_comes_last)


def _comes_last(item: pytest.Item) -> bool:
    params = getattr(item, "callspec", None)
    may_compile = params is not None and params.params.get("backend") in MAY_COMPILE
    return may_compile and Path(__file__).parent in item.path.parents
