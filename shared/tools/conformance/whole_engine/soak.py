"""Soak test: a whole engine under random load, with no wrong text, no leak and no stall.

In each round an engine is built with random flags; requests are streamed, aborted, dropped and retracted; all
invariants are checked after every step. Then each answer is compared with that of the same request alone, on
an idle engine of the reference panel. In float32 the tokens are equal except at near ties, which are counted.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.scheduling.invariants import check_idle
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.tolerance import NEAR_TIE, tolerance
from diptych.shared.tools.conformance.whole_engine.random_load import (
    Question,
    random_act,
    random_flags,
    random_question,
)
from diptych.shared.types import FinishAbort, GenerateOutput, SamplingParams, TokenLogprob

NUM_ACTS = 120
MAX_DRAWS = 20
"""Of random flags, until they go together with the given ones."""
DTYPE = "float32"
WHAT_TO_RUN = ("model", "tokenizer", "load_format", "device", "dtype", "random_seed")
MAX_STEPS_PER_REQUEST = 400
"""A prompt's token and an output token take at most a step each; the rest is for retractions."""


@dataclass
class Asked:
    """A request and its results."""

    question: Question
    reader: Iterator[GenerateOutput] | None  # of a stream; None: submitted without one
    collectors: list[Any] = field(default_factory=list)
    pieces: list[GenerateOutput] = field(default_factory=list)  # that its reader got
    may_be_cut: bool = False  # aborted or dropped

    def answers(self) -> list[GenerateOutput]:
        """The answers of all samples with output. The pieces of a stream are joined."""
        if self.reader is None:
            return [collector.whole() for collector in self.collectors]
        by_index: dict[int, list[GenerateOutput]] = {}
        for piece in self.pieces:
            by_index.setdefault(piece.index, []).append(piece)
        return [_joined(pieces) for pieces in by_index.values()]


def _joined(pieces: list[GenerateOutput]) -> GenerateOutput:
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        output_ids=[token_id for piece in pieces for token_id in piece.output_ids],
        output_logprobs=[entry for piece in pieces for entry in piece.output_logprobs],
    )


class Tally(NamedTuple):
    num_requests: int = 0
    num_steps: int = 0
    num_retractions: int = 0
    num_cut: int = 0  # aborted, dropped or refused
    num_near_ties: int = 0
    num_uncompared: int = 0  # answers of a round that reached its deadline

    def plus(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(self, other)))


class Soak:
    """`flags` apply in every round: what to run, and the flags that are not random."""

    def __init__(self, flags: dict[str, Any], num_acts: int = NUM_ACTS) -> None:
        if flags.get("dtype", DTYPE) != DTYPE:
            raise ValueError(f"dtype={flags['dtype']}: answers are compared token by token in {DTYPE} only")
        if flags.get("dp", 1) > 1:
            raise ValueError(f"dp={flags['dp']}: the state of one engine is checked after every step")
        self.flags = {**flags, "dtype": DTYPE}
        self.num_acts = num_acts
        what = {name: value for name, value in self.flags.items() if name in WHAT_TO_RUN}
        self.alone = LLM(
            **what,
            panel="reference",
            max_total_tokens=1024,
            disable_radix_cache=True,
            chunked_prefill_size=None,
            max_running_requests=1,
        )
        if self.alone.tokenizer is None:
            raise ValueError(f"model={self.alone.config.model}: texts are compared, so it needs a tokenizer")

    def round(
        self, seed: int, deadline: float = math.inf, on_progress: Callable[[str], None] = lambda what: None
    ) -> Tally:
        """Raises `Mismatch` or `InvariantViolation`. `deadline`: the value of `time.monotonic()` at which the
        round ends: the first half is for requests, after which running ones are aborted; the second half is
        for comparisons. At least one answer is compared. `on_progress` is called often, with the round's
        counts."""
        rng = random.Random(seed)
        llm = LLM(config=self._random_config(rng))
        start = time.monotonic()
        played = Round(llm, rng, deadline=start + (deadline - start) / 2)
        for number in range(self.num_acts):
            if number and played.is_late():
                break
            on_progress(f"event {number + 1} of {self.num_acts}")
            played.act()
        on_progress("requests run to their end")
        played.run_to_end()
        answers = [answer for asked in played.asked for answer in asked.answers()]
        num_compared = num_near_ties = 0
        for asked in played.asked:
            if num_compared and time.monotonic() > deadline:
                break
            on_progress(f"{num_compared} of {len(answers)} answers compared")
            found = asked.answers()
            num_compared += len(found)
            num_near_ties += self._compare(asked, found)
        stats = llm.stats()
        num_cut = sum(_is_cut(answer) for answer in answers)
        num_uncompared = len(answers) - num_compared
        return Tally(
            num_compared, stats.num_steps, stats.num_retractions, num_cut, num_near_ties, num_uncompared
        )

    def _random_config(self, rng: random.Random) -> EngineConfig:
        """Random flags that go together with the given ones."""
        for _ in range(MAX_DRAWS):
            try:
                return EngineConfig().updated(**{**random_flags(rng, self.alone.config.model), **self.flags})
            except ValueError as error:
                refused = error
        raise refused

    def _compare(self, asked: Asked, answers: list[GenerateOutput]) -> int:
        """Compare the answers. Returns how many diverged at a near tie."""
        if not answers:
            return 0
        alone = self._answers_alone(asked.question, asked.question.params)
        return sum(self._departs(asked, got, alone[got.index]) for got in answers)

    def _departs(self, asked: Asked, got: GenerateOutput, alone: GenerateOutput) -> bool:
        rid, reason = got.rid, got.finish_reason
        expected = alone.output_ids
        if _is_cut(got):
            is_full = isinstance(reason, FinishAbort) and reason.status == 503
            expect_true(f"{rid} may be cut short", asked.may_be_cut or is_full, reason)
            expected = expected[: len(got.output_ids)]
        if got.output_ids != expected:
            self._expect_near_tie(asked.question, got, alone)
            return True
        if not _is_cut(got):
            expect_equal(f"how {rid} ends", reason, alone.finish_reason)
            expect_equal(f"{rid}'s text", got.text, alone.text)
            _expect_close(f"logprobs of {rid}", got.output_logprobs, alone.output_logprobs)
            _expect_close(f"logprobs of {rid}'s prompt", got.input_logprobs, alone.input_logprobs)
        return False

    def _answers_alone(self, question: Question, params: SamplingParams) -> list[GenerateOutput]:
        found = self.alone.generate(question.prompt, params, progress=False)
        return found if isinstance(found, list) else [found]

    def _expect_near_tie(self, question: Question, got: GenerateOutput, alone: GenerateOutput) -> None:
        """Check a near tie: with its logit raised by the tolerance, the token is sampled alone too."""
        pairs = zip(got.output_ids, alone.output_ids)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            raise Mismatch(f"{got.rid}'s tokens", alone.output_ids, got.output_ids)
        params, token_id = question.params, got.output_ids[place]
        raised = params.logit_bias.get(token_id, 0.0) + NEAR_TIE[torch.float32]
        nearly = replace(params, logit_bias={**params.logit_bias, token_id: raised})
        ids = self._answers_alone(question, nearly)[got.index].output_ids[: place + 1]
        if ids != got.output_ids[: place + 1]:
            raise Mismatch(f"{got.rid}'s token {place}", alone.output_ids, got.output_ids)


class Round:
    """One engine, and its requests. After `deadline` none is added, and those that run are aborted."""

    def __init__(self, llm: LLM, rng: random.Random, deadline: float = math.inf) -> None:
        self.llm = llm
        self.rng = rng
        self.deadline = deadline
        self.asked: list[Asked] = []

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def act(self) -> None:
        rng, act = self.rng, random_act(self.rng)
        streams = [asked for asked in self.asked if asked.reader is not None and not asked.may_be_cut]
        if act in ("submit", "stream"):
            self._ask(is_stream=act == "stream")
        elif act == "step":
            for _ in range(rng.randint(1, 6)):
                self.llm.step()
        elif act == "read" and streams:
            _read(rng.choice(streams))
        elif act == "drop" and streams:
            asked = rng.choice(streams)
            asked.may_be_cut = True
            asked.reader.close()  # type: ignore[union-attr]  # a generator
            expect_true(
                "a dropped stream's requests are gone", not self.llm.abort(asked.question.names["rid"])
            )
        elif act == "abort" and self.asked:
            asked = rng.choice(self.asked)
            asked.may_be_cut |= self.llm.abort(asked.question.names["rid"])
        elif act == "retract" and self.llm.scheduler.state().running:
            self.llm.scheduler.retract(rng.choice(self.llm.scheduler.state().running).rid)
        elif act == "flush":
            state = self.llm.scheduler.state()
            is_idle = not (state.waiting_queue or state.running or state.chunked_req)
            expect_equal("flush_cache()", self.llm.flush_cache(), is_idle)

    def _ask(self, is_stream: bool) -> None:
        llm, is_greedy = self.llm, self.llm.config.speculative is not None
        assert llm.tokenizer is not None
        question = random_question(self.rng, f"q{len(self.asked)}", llm.tokenizer, is_greedy)
        if is_stream:
            self.asked.append(Asked(question, llm.stream(question.prompt, question.params, **question.names)))
        else:
            collectors = llm.submit(question.prompt, question.params, **question.names)
            self.asked.append(Asked(question, None, collectors))

    def run_to_end(self) -> None:
        """Run all requests to their end: none starves, and all memory is freed."""
        most = MAX_STEPS_PER_REQUEST * sum(asked.question.params.n for asked in self.asked)
        num_steps = 0
        while self.llm.step():
            if self.is_late():
                self.abort_all()
            num_steps += 1
            expect_true(f"all work ends within {most} steps", num_steps <= most)
        for asked in self.asked:
            while asked.reader is not None and _read(asked):
                pass
        parts = self.llm.assembly.parts
        check_idle(parts.allocator, parts.req_to_token_pool, parts.tree_cache)
        expect_true("the cache can be flushed when idle", self.llm.flush_cache())
        expect_equal("free slots", parts.allocator.available_size(), parts.allocator.size)

    def abort_all(self) -> None:
        for asked in self.asked:
            asked.may_be_cut |= self.llm.abort(asked.question.names["rid"])


def _read(asked: Asked) -> bool:
    """The next piece of a stream. False at its end."""
    assert asked.reader is not None
    piece = next(asked.reader, None)
    if piece is not None:
        asked.pieces.append(piece)
    return piece is not None


def _is_cut(answer: GenerateOutput) -> bool:
    return answer.finish_reason is None or isinstance(answer.finish_reason, FinishAbort)


def _expect_close(what: str, got: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    expect_equal(f"{what}, tokens", [e.token_id for e in got], [e.token_id for e in wanted])
    allowed = tolerance("logits", torch.float32)  # a log-probability is as exact as the logits behind it
    for i, (a, b) in enumerate(zip(got, wanted)):
        values = [a.logprob, *(value for _, value in a.top)], [b.logprob, *(value for _, value in b.top)]
        expect_equal(f"{what}: number {i}, alternatives", len(values[0]), len(values[1]))
        for x, y in zip(*values):
            is_close = x == y or (
                x is not None and y is not None and abs(x - y) <= allowed.atol + allowed.rtol * abs(y)
            )
            expect_true(f"{what}: number {i} is close", is_close, (x, y))
