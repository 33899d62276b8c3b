"""Counts the calls that reach each implementation.

A fast path that silently falls back gives right answers slowly, so comparisons do not detect it. A test of a
fast path therefore also asserts that it ran:

    with DispatchRecord() as record:
        record.watch_engine(llm)
        record.watch(kernels.decode_attention, "launch")
        llm.generate(...)
    record.expect_ran("attention.run", "diptych.optimized.attention.triton.TritonAttention")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from diptych.shared.tools.conformance.clauses.compare import Mismatch

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM

ENTRY_POINTS = {
    "attention": ("plan", "run"),
    "model_runner": ("forward_and_sample", "forward"),
    "sampler": ("sample",),
    "tree_cache": ("match_prefix", "cache_unfinished_req", "cache_finished_req", "evict"),
    "allocator": ("alloc_extend", "alloc_decode", "free"),
    "scheduler": ("step",),
}
"""component of a running engine -> the methods through which its work arrives"""


class DispatchRecord:
    """Counts calls while it is open (`with`), and then restores the original functions."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (entry point, implementation) -> calls
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> DispatchRecord:
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def watch_engine(self, llm: LLM) -> None:
        """Count calls of every component of an engine."""
        parts = llm.assembly.parts
        owners = {
            "attention": parts.model_runner.attention,  # type: ignore[attr-defined]
            "model_runner": parts.model_runner,
            "sampler": parts.sampler,
            "tree_cache": parts.tree_cache,
            "allocator": parts.allocator,
            "scheduler": llm.scheduler,
        }
        for component, owner in owners.items():
            for name in ENTRY_POINTS[component]:
                self.watch(owner, name, f"{component}.{name}")

    def watch(self, owner: Any, name: str, label: str | None = None) -> None:
        """Count calls of `owner.name`, a method of an object or a function of a module."""
        function = getattr(owner, name)
        is_own_attribute = name in vars(owner)
        implementation = owner.__name__ if not hasattr(type(owner), name) else _class_name(owner)
        key = (label or name, implementation)

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[key] += 1
            return function(*args, **kwargs)

        setattr(owner, name, counted)
        self._undo.append(
            lambda: setattr(owner, name, function) if is_own_attribute else delattr(owner, name)
        )

    def implementations(self, label: str) -> set[str]:
        """The implementations that were called at an entry point."""
        return {implementation for (entry, implementation) in self.calls if entry == label}

    def expect_ran(self, label: str, implementation: str) -> None:
        """Raise `Mismatch` unless this implementation, and no other, was called at the entry point."""
        found = self.implementations(label)
        if found != {implementation}:
            raise Mismatch(f"who did {label}", implementation, sorted(found) or "none")


def _class_name(owner: Any) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"
