"""Compiles grammars in a process that can be killed, and keeps the results."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

from diptych.shared.grammar.lanes import LONG_BYTES, Lane
from diptych.shared.grammar.matcher import MatcherGrammar
from diptych.shared.grammar.reasoning import ReasoningGrammar
from diptych.shared.grammar.spec import GrammarSpec, spec_of
from diptych.shared.grammar.worker import read_frame, write_frame
from diptych.shared.interfaces.grammar import Grammar
from diptych.shared.text.token_bytes import TokenBytes
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types import Req, SamplingParams

COMPILE_SECONDS = 10.0
"""CPU time of one grammar."""
WAIT_FACTOR = 3.0
"""Times the CPU time: how long the engine waits for it, on a computer that does other work too."""
START_SECONDS = 120.0
"""Time limit of the worker's start: imports, and the vocabulary."""
MAX_CACHED = 256
"""Compiled grammars and errors that are kept, the latest used ones."""
RETRY_SECONDS = 60.0
"""How long it is remembered that a grammar took too long, or that no worker survived it."""
NUM_TRIES = 2
"""A worker may be ended by others, or by lack of memory: the next one gets the same grammar."""
CRASHES = frozenset([signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
"""How a grammar ends its worker."""
UNSPELLABLE = b"\xff"
"""Begins no character in UTF-8."""
MISSING = "structured output needs xgrammar: pip install 'diptych[grammar]'"
ROOT = Path(__file__).parents[3]


class GrammarCompiler:
    """One per engine. Short and long grammars have a lane each, with a thread that talks to a worker process;
    both start with the first grammar. `stop_token_ids` end a complete text. Without a tokenizer every grammar
    is refused."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_token_ids: int,
        stop_token_ids: frozenset[int],
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_token_ids = num_token_ids
        self.stop_token_ids = frozenset(i for i in stop_token_ids if i < num_token_ids)
        self.compile_seconds = compile_seconds
        self._cache: OrderedDict[GrammarSpec, tuple[Future[Any], float]] = OrderedDict()
        self._lock = threading.Lock()
        self._info: Any = None  # xgrammar's TokenizerInfo
        self._is_closed = False

    @cached_property
    def lanes(self) -> tuple[Lane, Lane]:
        """The lane of short texts, and that of long ones."""
        return Lane(), Lane()

    def submit(self, params: SamplingParams, client: str = "") -> Future[Any] | None:
        """The compiled grammar of a request, for `grammar_for`; None: it needs none. Returns at once. Raises
        `ValueError` for one that exceeds the limits; the future raises it for one that cannot be compiled,
        and `CompilerFailed`, which is not kept, where the grammar is not to blame. client: with whose other
        grammars it waits."""
        spec = spec_of(params)
        if spec is None:
            return None
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: a grammar needs one")
        if not self.stop_token_ids:
            raise ValueError("this model has no end-of-sequence token: a grammar needs one")
        if importlib.util.find_spec("xgrammar") is None:  # importing it takes seconds: not here
            raise ValueError(MISSING)
        with self._lock:
            entry = self._cache.get(spec)
            if entry is None or entry[1] < time.monotonic() or _has_failed(entry[0]):
                lane = self.lanes[len(spec.text) > LONG_BYTES]
                entry = lane.submit(client, self._compile, spec, lane), float("inf")
                self._cache[spec] = entry
            self._cache.move_to_end(spec)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return entry[0]

    def withdraw(self, compiled: Future[Any]) -> None:
        """Nothing waits for this grammar any more: unless it is being compiled, it is not."""
        with self._lock:
            if compiled.cancel():
                for spec in [spec for spec, entry in self._cache.items() if entry[0] is compiled]:
                    del self._cache[spec]

    def grammar_for(self, req: Req, compiled: Any) -> Grammar:
        """A grammar of the request's own, at its beginning."""
        grammar: Grammar = MatcherGrammar(import_xgrammar().GrammarMatcher(compiled))
        params = req.sampling_params
        if params.reasoning_end:
            grammar = ReasoningGrammar(
                grammar, params.reasoning_start, params.reasoning_end, self.stop_token_ids
            )
        return grammar

    def as_text(self, params: SamplingParams) -> str:
        """The compiled grammar of a request, for `from_text` in another process of the engine."""
        compiled = self.submit(params)
        assert compiled is not None, "the request has no grammar"
        text: str = compiled.result().serialize_json()
        return text

    def from_text(self, text: str) -> Any:
        """A compiled grammar, for `grammar_for`."""
        if self._info is None:
            self._info = self._tokenizer_info()
        return import_xgrammar().CompiledGrammar.deserialize_json(text, self._info)

    def clear(self) -> None:
        """Forget all compiled grammars."""
        with self._lock:
            self._cache.clear()

    def close(self) -> None:
        """End the workers. A grammar that is being compiled fails."""
        self._is_closed = True
        for lane in self.__dict__.get("lanes", ()):  # there are none before the first grammar
            lane.cancel()
            worker, lane.worker = lane.worker, None
            if worker is not None:
                worker.kill()

    # ---- in the threads ----

    def _compile(self, spec: GrammarSpec, lane: Lane) -> Any:
        if self._info is None:
            self._info = self._tokenizer_info()
        answer = self._ask(spec, lane)
        if not answer.startswith("="):
            raise ValueError(f"{spec.kind} cannot be compiled: {answer[1:]}")
        return self.from_text(answer[1:])

    def _ask(self, spec: GrammarSpec, lane: Lane) -> str:
        """The answer of the lane's worker. Raises `ValueError` for a grammar that takes too long or that two
        workers do not survive, and `CompilerFailed` for any other end of a worker."""
        end = WorkerEnded()
        for _ in range(NUM_TRIES):
            if self._is_closed:
                break
            try:
                if lane.worker is None or lane.worker.has_ended:  # killed since the last grammar
                    lane.worker = Worker(self._info.serialize_json())
                return lane.worker.ask([*spec, self.compile_seconds], WAIT_FACTOR * self.compile_seconds)
            except WorkerEnded as error:
                lane.worker, end = None, error
            if end.is_late or end.signal == signal.SIGPROF:
                break
        if end.is_start:
            raise CompilerFailed("the process that compiles grammars does not start")
        if end.signal == signal.SIGPROF:
            problem = f"compiling it takes longer than {self.compile_seconds:g} s of CPU time"
        elif end.signal in CRASHES:
            problem = "it is too complex: the compiler did not survive it"
        else:
            raise CompilerFailed(f"{spec.kind}: the compiler of grammars has ended or is too slow; try again")
        with self._lock:
            if spec in self._cache:
                self._cache[spec] = self._cache[spec][0], time.monotonic() + RETRY_SECONDS
        raise ValueError(f"{spec.kind}: {problem}")

    def _tokenizer_info(self) -> Any:
        """The bytes of every token. Those of special and of stop tokens are no UTF-8, so no text of a grammar
        allows one, and none of them ends a text that is not complete; a structural tag that names the token
        does allow it."""
        assert self.tokenizer is not None
        xgrammar, token_bytes = import_xgrammar(), TokenBytes(self.tokenizer)
        unspelled = self.tokenizer.special_ids | self.stop_token_ids
        return xgrammar.TokenizerInfo(
            [UNSPELLABLE * (i in unspelled) + token_bytes.of(i) for i in range(self.num_token_ids)],
            xgrammar.VocabType.RAW,
            vocab_size=self.num_token_ids,
            stop_token_ids=sorted(self.stop_token_ids),
        )


class CompilerFailed(RuntimeError):
    """The compiler has failed, for a reason that is not the grammar's."""


class WorkerEnded(Exception):
    """The worker has ended: by a signal, or killed because it had not answered in time (`is_late`).
    `is_start`: before it was ready."""

    def __init__(self, signal: int | None = None, is_late: bool = False) -> None:
        super().__init__()
        self.signal = signal
        self.is_late = is_late
        self.is_start = False


def _has_failed(compiled: Future[Any]) -> bool:
    """Whether another attempt may succeed."""
    if not compiled.done() or compiled.cancelled():
        return compiled.cancelled()
    error = compiled.exception()
    return error is not None and not isinstance(error, ValueError)


class Worker:
    """A process of shared/grammar/worker.py. After `WorkerEnded` it is gone, or has not come to be."""

    def __init__(self, info_text: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diptych.shared.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            start_new_session=True,  # Ctrl-C in the terminal concerns the engine
        )
        self._end_with_owner = weakref.finalize(self, self._process.kill)
        try:
            self._exchange(info_text, START_SECONDS)
        except WorkerEnded as end:
            end.is_start = True
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, message: Any, seconds: float) -> str:
        """The answer to a message. Raises `WorkerEnded`."""
        return self._exchange(json.dumps(message), seconds)

    def _exchange(self, text: str, seconds: float) -> str:
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(OSError, ValueError):
                write_frame(self._process.stdin, text)  # type: ignore[arg-type]
                answer = read_frame(self._process.stdout)  # type: ignore[arg-type]
        finally:
            timer.cancel()
        if answer is None:
            self.kill()
            raise WorkerEnded(-self._process.returncode, late.is_set())
        return answer

    def kill(self) -> None:
        """End the process now."""
        self._end_with_owner()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def import_xgrammar() -> Any:
    """The package, which is an extra. Raises `ValueError` where it is missing."""
    try:
        import xgrammar
    except ImportError:
        raise ValueError(MISSING) from None
    return xgrammar
