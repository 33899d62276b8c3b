"""Requests whose grammar is being compiled: they wait here, and requests without a grammar do not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.types import FinishAbort, FinishError, FinishReason, Req


class Waiting(NamedTuple):
    req: Req
    compiled: Future[Any]


class GrammarQueue:
    """Requests that wait for their grammar, in the order of arrival."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[str, Waiting] = {}  # by request id

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def add(self, req: Req, client: str = "") -> bool:
        """False when the request needs no grammar: it does not wait. Raises `ValueError` for a grammar that
        exceeds the limits. client: from whom it comes."""
        compiled = self._compiler.submit(req.sampling_params, client)
        if compiled is None:
            return False
        self._waiting[req.rid] = Waiting(req, compiled)
        return True

    def drop(self, rid: str) -> bool:
        """The request leaves without a grammar. False when it does not wait."""
        dropped = self._waiting.pop(rid, None)
        if dropped is None:
            return False
        if not any(other.compiled is dropped.compiled for other in self._waiting.values()):
            self._compiler.withdraw(dropped.compiled)
        return True

    def take_ready(self) -> list[tuple[Req, FinishReason | None]]:
        """Requests that wait no longer, with their grammar set, or with the end that they have: status 400
        for a grammar that is wrong, 503 for a compiler that has failed."""
        ready = [waiting for waiting in self._waiting.values() if waiting.compiled.done()]
        return [(waiting.req, self._finish(waiting)) for waiting in ready]

    def _finish(self, waiting: Waiting) -> FinishReason | None:
        del self._waiting[waiting.req.rid]
        try:
            waiting.req.grammar = self._compiler.grammar_for(waiting.req, waiting.compiled.result())
        except ValueError as error:
            return FinishAbort(str(error), 400)
        except Exception as error:  # of the compiler's: the request ends, the engine goes on
            return FinishError(str(error) or type(error).__name__, 503)
        return None
