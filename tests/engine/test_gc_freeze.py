"""The collector looks at nothing old while an engine runs, and at everything afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.python_runtime import FEW, gc_freeze
from diptych.shared.types import SamplingParams


class Knot:
    """Cyclic garbage when unreferenced: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(scope="module", autouse=True)
def thawed(count_frozen: Callable[[], int]) -> Iterator[None]:
    """The tests' own freezing (tests/conftest.py) is undone meanwhile."""
    gc.unfreeze()
    gc.disable()  # else what is thawed is looked through again and again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", count_frozen)
        yield
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    assert gc.get_freeze_count() < FEW
    yield
    assert gc.get_freeze_count() < FEW


def test_old_objects_wait_and_new_ones_do_not() -> None:
    old = Knot()
    old_ref = weakref.ref(old)
    with gc_freeze():
        new_ref = weakref.ref(Knot())
        del old
        gc.collect()
        assert new_ref() is None
        assert old_ref() is not None
    gc.collect()
    assert old_ref() is None


def test_immortal_objects_are_no_freeze_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 keeps a few hundred where frozen objects are."""
    frozen: list[str] = []
    monkeypatch.setattr("gc.get_freeze_count", lambda: 375)
    monkeypatch.setattr("gc.freeze", lambda: frozen.append("freeze"))
    monkeypatch.setattr("gc.unfreeze", lambda: frozen.append("unfreeze"))
    with gc_freeze():
        assert frozen == ["freeze"]
    assert frozen == ["freeze", "unfreeze"]
    monkeypatch.undo()


def test_blocks_nest() -> None:
    with gc_freeze():
        with gc_freeze():
            pass
        assert gc.get_freeze_count() > FEW, "the outer block goes on"


def test_an_exception_ends_a_block() -> None:
    with pytest.raises(KeyboardInterrupt), gc_freeze():
        raise KeyboardInterrupt


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with gc_freeze():
            pass
        assert gc.get_freeze_count() > FEW
    finally:
        gc.unfreeze()


def test_generate_submits_and_steps_with_old_objects_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model="tiny-dense", device="cpu", panel="reference")
    counts: dict[str, list[int]] = {"submit": [], "step": []}

    def counting(name: str) -> Callable[..., Any]:
        owner = llm._live if name == "submit" else llm
        method = getattr(owner, name)

        def counted(*args: Any, **names: Any) -> Any:
            counts[name].append(gc.get_freeze_count())
            return method(*args, **names)

        return counted

    for name in counts:
        monkeypatch.setattr(llm._live if name == "submit" else llm, name, counting(name))
    llm.generate(["one two", "three"], SamplingParams(max_new_tokens=3), progress=False)
    assert len(counts["submit"]) == 1
    assert counts["step"]
    assert min(counts["submit"] + counts["step"]) > FEW
