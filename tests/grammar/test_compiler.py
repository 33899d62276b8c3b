"""Compiling in a process that can be killed: what is refused, cached, and survived."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from diptych.shared.grammar import compiler as module
from diptych.shared.grammar.compiler import CompilerFailed, GrammarCompiler, Worker, WorkerEnded
from diptych.shared.grammar.matcher import allows
from diptych.shared.grammar.queue import GrammarQueue
from diptych.shared.grammar.spec import GrammarSpec
from diptych.shared.interfaces.grammar import Grammar
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types import FinishError, FinishReason, Req, SamplingParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def one_of(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    return {"oneOf": [one_of(depth - 1), one_of(depth - 1)]}


SLOW = ("exponential rules", "nested oneOf")  # whether the time limit ends them is left to the whole run
HOSTILE: dict[str, dict[str, Any]] = {
    "invalid regex": {"regex": "(a"},
    "lookahead": {"regex": "(?=a)b"},
    "groups": {"regex": "(a|b)*" * 8000},
    "nested groups": {"regex": "(" * 30_000 + ")" * 30_000},
    "no root": {"ebnf": 'other ::= "a"'},
    "no grammar": {"ebnf": "%%%"},
    "exponential rules": {
        "ebnf": "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(1500)) + '\nr1500 ::= "a"\nroot ::= r0'
    },
    "nested oneOf": {"json_schema": one_of(9)},
    "unknown type": {"json_schema": {"type": "colour"}},
    "dangling reference": {"json_schema": {"$ref": "#/$defs/none"}},
    "no structural tag": {"structural_tag": "{}"},
}  # fmt: skip
HARMLESS: dict[str, dict[str, Any]] = {
    "left recursion": {"ebnf": 'root ::= root "a" | "a"'},
    "recursive schema": {"json_schema": {"type": "object", "properties": {"next": {"$ref": "#"}}}},
    "many groups": {"regex": "(a)" * 10_000},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(ASSETS / "tiny-dense")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """A busy computer is no reason to refuse a grammar."""
    compiler = make(tokenizer, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WAIT_FACTOR", 50.0)
        yield compiler
    compiler.close()


def make(tokenizer: Tokenizer | None, seconds: float = module.COMPILE_SECONDS) -> GrammarCompiler:
    num_tokens = tokenizer.vocab_size if tokenizer is not None else 10
    eos = tokenizer.eos_token_ids if tokenizer is not None else frozenset([0])
    return GrammarCompiler(tokenizer, num_tokens, eos, compile_seconds=seconds)


def grammar(compiler: GrammarCompiler, **params: Any) -> Grammar:
    req = Req("r", [1], SamplingParams(**params), 0)
    compiled = compiler.submit(req.sampling_params)
    assert compiled is not None
    return compiler.grammar_for(req, compiled.result(timeout=60))


def accepts(compiler: GrammarCompiler, text: str, **params: Any) -> bool:
    """Whether the text and an end-of-sequence token are allowed, token by token."""
    assert compiler.tokenizer is not None
    found = grammar(compiler, **params)
    ids = compiler.tokenizer.encode(text, add_special_tokens=False)
    ids.append(min(compiler.stop_token_ids))
    masks = [found.next_tokens(ids[:n], compiler.num_token_ids) for n in range(len(ids))]
    is_end = found.is_terminated(ids)
    assert is_end == all(map(allows, masks, ids))
    assert not found.next_tokens(ids, compiler.num_token_ids).any()
    return is_end


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        ({"json_schema": PERSON}, '{"name": "Mara", "age": 3}', '{"name": "Mara"}'),
        ({"json_schema": PERSON}, '{"name": "", "age": -1}', '{"name": "Mara",\n "age": 3}'),
        ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"regex": r"\d{3}-[ab]+"}, "123-ab", "123-"),
        ({"ebnf": 'root ::= "<" root ">" | "x"'}, "<<x>>", "<x"),
        ({"choice": ("yes", "no, \"thanks\"\n")}, 'no, "thanks"\n', "nope"),
        ({"choice": ("Café 東京",)}, "Café 東京", "Cafe"),
    ],
)  # fmt: skip
def test_kinds(compiler: GrammarCompiler, params: dict[str, Any], right: str, wrong: str) -> None:
    assert accepts(compiler, right, **params)
    assert not accepts(compiler, wrong, **params)


def test_special_tokens_are_never_allowed(compiler: GrammarCompiler) -> None:
    assert compiler.tokenizer is not None
    mask = grammar(compiler, regex=r"(.|\n)*").next_tokens([], compiler.num_token_ids)
    allowed = {i for i in compiler.tokenizer.special_ids if allows(mask, i)}
    assert allowed == compiler.stop_token_ids


def test_a_stop_token_that_is_plain_text_ends_no_incomplete_text(tokenizer: Tokenizer) -> None:
    """xgrammar takes such a token for its text, and ends the answer with it."""
    (stop,) = tokenizer.encode("a", add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset([stop]))
    info = compiler._tokenizer_info()
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_regex("[a-z]+")
    matcher = xgrammar.GrammarMatcher(compiled)
    assert not matcher.accept_token(stop)
    assert matcher.accept_string("b")
    assert matcher.accept_token(stop)
    assert matcher.is_terminated()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in HOSTILE]
)
def test_a_hostile_grammar_is_refused_within_seconds(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be compiled|takes longer|too complex|nested more"):
        grammar(compiler, **HOSTILE[name])
    assert accepts(compiler, "ab", regex="ab")


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_hostile_and_is_not(compiler: GrammarCompiler, name: str) -> None:
    assert grammar(compiler, **HARMLESS[name]).next_tokens([], compiler.num_token_ids).any()


def test_results_and_errors_are_cached(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.submit(SamplingParams(json_schema=PERSON))
    assert compiler.submit(SamplingParams(json_schema=json.dumps(PERSON), temperature=0.3)) is first
    bad = compiler.submit(SamplingParams(regex="(b"))
    assert bad is not None
    assert bad.exception() is not None
    assert compiler.submit(SamplingParams(regex="(b")) is bad
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for text in ("x", "y"):
        compiler.submit(SamplingParams(regex=text))
    assert compiler.submit(SamplingParams(regex="(b")) is not bad
    assert len(compiler._cache) == 2


@pytest.mark.full
def test_a_time_out_is_forgotten_after_a_while(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make(tokenizer, 0.2)
    params = SamplingParams(regex="(a|b)*" * 8000)
    late = compiler.submit(params)
    assert late is not None
    assert "takes longer than 0.2 s" in str(late.exception())
    assert compiler.submit(params) is late
    monkeypatch.setattr(module, "RETRY_SECONDS", -1.0)
    params = SamplingParams(regex="(a|c)*" * 8000)
    late = compiler.submit(params)
    assert late is not None
    assert late.exception() is not None
    assert compiler.submit(params) is not late
    compiler.close()


@pytest.mark.full  # the fast cut kills one that compiles
def test_a_killed_worker_is_replaced_and_one_ends_with_its_compiler(tokenizer: Tokenizer) -> None:
    compiler = make(tokenizer)
    assert accepts(compiler, "a", regex="a")
    assert compiler.lanes[0].worker is not None
    compiler.lanes[0].worker._process.kill()
    compiler.lanes[0].worker._process.wait()
    assert accepts(compiler, "b", regex="b")
    assert compiler.lanes[0].worker is not None
    process = compiler.lanes[0].worker._process
    assert process.poll() is None
    compiler.close()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("signals", "error"),
    [
        ([signal.SIGKILL], None),
        pytest.param([signal.SIGSEGV], None, marks=pytest.mark.full),
        pytest.param([signal.SIGKILL, signal.SIGKILL], CompilerFailed, marks=pytest.mark.full),
        pytest.param([signal.SIGSEGV, signal.SIGKILL], CompilerFailed, marks=pytest.mark.full),
        pytest.param([signal.SIGKILL, signal.SIGSEGV], ValueError, marks=pytest.mark.full),
        ([signal.SIGPROF], ValueError),
    ],
)
def test_a_worker_that_ends_while_it_compiles(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    signals: list[signal.Signals],
    error: type[Exception] | None,
) -> None:
    """Another worker tries it again. What is not the grammar's fault is its own error, and is not kept."""
    ask, ends = Worker.ask, iter(signals)
    compiler = make(tokenizer)

    def ask_and_end(self: Worker, message: Any, seconds: float) -> str:
        is_ours = self is compiler.lanes[0].worker  # an earlier test may have left a compiler at work
        end = next(ends, None) if is_ours else None
        if end is not None:
            self._process.send_signal(end)
            assert self._process.wait() == -end
        return ask(self, message, seconds)

    monkeypatch.setattr(Worker, "ask", ask_and_end)
    params = SamplingParams(regex="a")
    compiled = compiler.submit(params)
    assert compiled is not None
    assert type(compiled.exception(60)) is (error or type(None))
    assert (compiler.submit(params) is compiled) == (error is not CompilerFailed)
    if error is not ValueError:
        assert accepts(compiler, "a", regex="a")
    assert next(ends, None) is None
    compiler.close()


@pytest.mark.parametrize("num_kills", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_worker_that_is_killed_while_it_starts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    """Found by `diptych soak --server`: a start takes seconds on a busy computer."""
    compiler, here = make(tokenizer), threading.get_ident()
    compiler._info = compiler._tokenizer_info()
    exchange, kills = Worker._exchange, [signal.SIGKILL] * num_kills

    def exchange_and_end(self: Worker, text: str, seconds: float) -> str:
        if threading.get_ident() == here and kills:
            self._process.send_signal(kills.pop())
        return exchange(self, text, seconds)

    monkeypatch.setattr(Worker, "_exchange", exchange_and_end)
    if num_kills == 1:
        assert compiler._ask(GrammarSpec("regex", "a"), compiler.lanes[0]).startswith("=")
    else:
        with pytest.raises(CompilerFailed, match="does not start"):
            compiler._ask(GrammarSpec("regex", "a"), compiler.lanes[0])
    assert not kills
    compiler.close()


def test_failures_of_the_compiler_are_no_fault_of_the_client(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a worker that cannot start. A worker that is late is the computer's: its limit is in real time."""

    def fail(*args: Any) -> str:
        raise WorkerEnded(signal.SIGKILL, is_late=True)

    monkeypatch.setattr(Worker, "_exchange", fail)
    compiler = make(tokenizer)
    queue = GrammarQueue(compiler)
    queue.add(Req("a", [1], SamplingParams(regex="a"), 0))
    (waiting,) = queue._waiting.values()
    waiting.compiled.exception(60)
    ((_, reason),) = queue.take_ready()
    assert isinstance(reason, FinishError)
    assert reason.status == 503
    assert "does not start" in reason.message
    compiler.close()


def test_the_worker_ends_with_a_compiler_that_is_dropped(
    tokenizer: Tokenizer, spawned_compiler: None
) -> None:
    compiler = make(tokenizer)
    grammar(compiler, regex="a")
    assert compiler.lanes[0].worker is not None
    process = compiler.lanes[0].worker._process
    del compiler
    gc.collect()
    assert process.wait(10) is not None


@pytest.mark.parametrize("name", [name for name, params in HOSTILE.items() if "structural_tag" not in params])
def test_a_request_that_waits_can_leave(tokenizer: Tokenizer, name: str) -> None:
    compiler = make(tokenizer)
    is_over = threading.Event()
    for lane in compiler.lanes:  # nothing is compiled meanwhile
        lane.submit("", is_over.wait)
    queue = GrammarQueue(compiler)
    start = time.thread_time()
    try:
        queue.add(Req("a", [1], SamplingParams(**HOSTILE[name]), 0))
    except ValueError:
        assert not queue
    else:
        assert queue.drop("a")
        assert not queue.drop("a")
        assert queue.take_ready() == []
    assert time.thread_time() - start < 0.5
    compiler.close()
    is_over.set()


def test_what_only_dropped_requests_wait_for_is_not_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, spec, lane: compiled.append(spec.text))
    compiler, is_over = make(tokenizer), threading.Event()
    compiler.lanes[0].submit("", is_over.wait)
    queue = GrammarQueue(compiler)
    for rid, pattern in (("a", "x"), ("b", "y"), ("c", "y"), ("d", "z")):
        queue.add(Req(rid, [1], SamplingParams(regex=pattern), 0))
    assert queue.drop("a")
    assert queue.drop("b")  # "c" waits for the same grammar
    queue.add(Req("e", [1], SamplingParams(regex="x"), 0))  # a new one, behind the others
    assert queue.drop("d")
    is_over.set()
    for waiting in queue._waiting.values():
        waiting.compiled.result(60)
    assert compiled == ["y", "x"]
    compiler.close()


def test_the_queue(compiler: GrammarCompiler) -> None:
    queue = GrammarQueue(compiler)
    assert not queue.add(Req("free", [1], SamplingParams(), 0))
    assert queue.add(Req("good", [1], SamplingParams(regex="a"), 0))
    assert queue.add(Req("bad", [1], SamplingParams(regex="(d"), 0))
    assert list(queue) == ["good", "bad"]
    found: dict[str, FinishReason | None] = {}
    end = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < end:
        for req, problem in queue.take_ready():
            found[req.rid] = problem
            assert (req.grammar is None) == (problem is not None)
        time.sleep(0.01)
    assert found["good"] is None
    assert "cannot be compiled" in str(found["bad"])
    assert len(queue) == 0


def test_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        make(None).submit(SamplingParams(regex="a"))
    assert make(None).submit(SamplingParams()) is None


def test_without_xgrammar(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'diptych\[grammar\]'"):
        compiler.submit(SamplingParams(regex="never seen"))


def test_nothing_starts_before_the_first_grammar(tokenizer: Tokenizer) -> None:
    compiler = make(tokenizer)
    assert compiler.submit(SamplingParams()) is None
    assert compiler.lanes[0].worker is None
    assert Path(module.ROOT, "diptych", "shared").is_dir()
