"""`diptych check engine`: an engine with other kernels or another number format against the native one.

All engines compute the same tokens: the float32 reference samples a continuation of each prompt, and the
others are forced to continue with it, step by step, as they decode. At each step the whole row of logits is
recorded, so that the errors are those of the engine, batches and prefix cache included.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.shared.tools.conformance.clauses.time_limit import TimeLimitExceeded, time_limit, until
from diptych.shared.types import SamplingParams

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM

MARGIN = 0.25
"""The arm may have this share of the native engine's error more than it. An arm that is as good as the native
one would fail 97.5 % of the time without a margin."""
NUM_RESAMPLES = 10_000
QUANTILE = 0.975  # upper end of the interval of 95 %
GATES = {
    "KL divergence": "A diverges from float32 as B, with --margin of B's more",
    "NLL error": "the same for log-probabilities of tokens",
    "batch invariance": "the same logits alone and in a batch, within the errors of A and B",
    "prefix cache invariance": "the same with a cold and a warm prefix cache",
}
"""Name -> what must hold, in the order of a report."""
FLOOR = 1e-8
"""KL divergence in nats. Sums in float32 in another order differ by less."""
NLL_FLOOR = 1e-5
"""The same for a log-probability. A KL divergence is about the square of its changes."""


@dataclass(frozen=True)
class Rows:
    """Log-probabilities float64 [steps, vocab_size] of each prompt, and the tokens that were appended."""

    logprobs: list[np.ndarray]
    tokens: list[list[int]]


class Recorder:
    """A logit processor of one request: records each row, and forces the next token of `forced` if given."""

    def __init__(self, forced: Sequence[int] | None) -> None:
        self.forced = forced
        self.rows: dict[int, torch.Tensor] = {}

    def __call__(self, output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(output_ids):
            at = len(ids)
            self.rows[at] = logits[row].float().cpu().clone()
            if self.forced is not None and at < len(self.forced):
                kept = logits[row, self.forced[at]].clone()
                logits[row] = float("-inf")
                logits[row, self.forced[at]] = torch.where(kept.isfinite(), kept, torch.zeros_like(kept))
        return logits


def record(
    llm: LLM,
    prompts: Sequence[list[int]],
    forced: Sequence[Sequence[int]] | None,
    num_tokens: int,
    together: bool = True,
    may_end: bool = False,
) -> Rows:
    """The rows of all prompts. `forced`: their continuations; None: they are sampled. `together`: all in
    flight, else one after the other. A request that ends early raises `RuntimeError`; with `may_end` its
    missing rows are NaN."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=1.0)
    recorders = [Recorder(None if forced is None else forced[i]) for i in range(len(prompts))]
    collectors: list[Any] = []
    for i, prompt in enumerate(prompts):
        one = SamplingParams(**{**vars(params), "seed": i})
        collectors += llm.submit(list(prompt), one, logit_processor=recorders[i])
        if not together:
            _finish(llm, collectors[-1:])
    _finish(llm, collectors)
    for i, (recorder, collector) in enumerate(zip(recorders, collectors)):
        num_rows = len(recorder.rows)
        if num_rows < num_tokens and not (may_end and forced is not None and recorder.rows):
            why = collector.finish_reason
            raise RuntimeError(f"prompt {i} ended after {num_rows} of {num_tokens} tokens: {why}")
        for at in range(num_rows, num_tokens):
            recorder.rows[at] = torch.full_like(recorder.rows[0], torch.nan)
    rows = [torch.stack([each.rows[i] for i in range(num_tokens)]).double() for each in recorders]
    logprobs = [torch.log_softmax(each, dim=-1).numpy() for each in rows]
    tokens = [list(collector.output_ids) for collector in collectors] if forced is None else forced
    return Rows(logprobs, [list(each[:num_tokens]) for each in tokens])


def _finish(llm: LLM, collectors: Sequence[Any]) -> None:
    while not all(collector.is_finished for collector in collectors) and llm.step():
        pass


def kl_by_prompt(expected: Rows, actual: Rows) -> np.ndarray:
    """Mean KL(expected || actual) of each prompt, in nats. inf where the actual rows are not finite."""
    found = []
    for one, other in zip(expected.logprobs, actual.logprobs):
        share = np.exp(one)
        with np.errstate(invalid="ignore"):
            terms = np.where(share > 0, share * (one - other), 0.0).sum(axis=1)
        found.append(float(np.nan_to_num(terms.mean(), nan=np.inf)))
    return np.array(found)


def nll_by_prompt(expected: Rows, actual: Rows) -> np.ndarray:
    """Mean absolute error of the log-probabilities of the tokens, of each prompt."""
    found = []
    for tokens, one, other in zip(expected.tokens, expected.logprobs, actual.logprobs):
        at = np.arange(len(tokens)), tokens
        found.append(float(np.nan_to_num(np.abs(one[at] - other[at]).mean(), nan=np.inf)))
    return np.array(found)


def interval(excess: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The ends of the bootstrap interval of the mean, prompts resampled."""
    if not np.isfinite(excess).all():
        return float("inf"), float("inf")
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(excess), size=(NUM_RESAMPLES, len(excess)))
    lower, upper = np.quantile(excess[picks].mean(axis=1), (1 - QUANTILE, QUANTILE))
    return float(lower), float(upper)


@dataclass(frozen=True)
class Gate:
    """One comparison: what the arm has more than the native engine lies between `lower` and `upper`."""

    name: str
    arm: float
    native: float
    lower: float
    upper: float
    allowed: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.upper <= self.allowed

    @property
    def fails(self) -> bool:
        return self.lower > self.allowed

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "fails" if self.fails else "undecided"


@dataclass
class GateReport:
    """The gates of one arm, and figures beside them."""

    gates: list[Gate] = field(default_factory=list)
    num_prompts: int = 0
    num_tokens: int = 0
    num_not_run: int = 0  # gates for which no time was left
    same_best: float = 1.0  # share of positions at which arm and float32 reference have the same best token

    @property
    def failing(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.fails]

    @property
    def undecided(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.verdict == "undecided"]

    @property
    def sentence(self) -> str:
        if self.failing:
            names = ", ".join(gate.name for gate in self.failing)
            return f"{len(self.failing)} of {len(self.gates)} gates fail: {names}"
        if self.undecided:
            names = ", ".join(gate.name for gate in self.undecided)
            return (
                f"{names}: undecided with {self.num_prompts} prompts; --num-prompts or --margin can be larger"
            )
        at = f"at {self.num_tokens} tokens of {self.num_prompts} prompts"
        if self.num_not_run:
            return f"{len(self.gates)} gates hold, {at}; {self.num_not_run} are not run: the time is over"
        return f"all {len(self.gates)} gates hold, {at}"


def error_gate(
    name: str, arm: np.ndarray, native: np.ndarray, margin: float, seed: int = 0, floor: float = FLOOR
) -> Gate:
    """The arm's error may exceed the native one by `margin` of it, with the confidence of the interval."""
    allowed = max(margin * float(native.mean()), floor)
    return Gate(name, float(arm.mean()), float(native.mean()), *interval(arm - native, seed), allowed)


def invariance_gate(name: str, one: Rows, other: Rows, errors: Sequence[np.ndarray], is_exact: bool) -> Gate:
    """Two runs of one engine. `errors`: by prompt, of the engine if they are allowed, and of the native one.
    No prompt differs by more than four times the larger mean of them, or the largest of all errors: where
    experts are chosen, a near tie moves a whole prompt. With `is_exact` every bit is the same."""
    kl = kl_by_prompt(one, other)
    largest = max(
        float(np.nan_to_num(np.abs(np.exp(a) - np.exp(b)), nan=1.0).max())
        for a, b in zip(one.logprobs, other.logprobs)
    )
    same = all(np.array_equal(a, b) for a, b in zip(one.logprobs, other.logprobs))
    note = "the same bits" if same else f"probabilities differ by {largest:.1e} at most"
    if is_exact:
        difference = 0.0 if same else largest
        return Gate(name, largest, 0.0, difference, difference, 0.0, note)
    most, native = float(kl.max()), float(errors[-1].mean())
    allowed = max(*(max(4 * float(each.mean()), float(each.max())) for each in errors), FLOOR)
    return Gate(name, float(kl.mean()), native, most, most, allowed, note)


def allowed_errors(
    of_error: Gate, together: np.ndarray, alone: np.ndarray, native: np.ndarray
) -> list[np.ndarray]:
    """The errors by prompt for `invariance_gate`. Those of A count as far as a prompt has them both alone and
    in a batch, and only if their own gate holds: what a batch does wrong allows nothing."""
    return [np.minimum(together, alone), native] if of_error.holds else [native]


def check_engine(
    arm: dict[str, Any],
    native: dict[str, Any],
    oracle: dict[str, Any],
    prompts: Sequence[list[int]],
    num_tokens: int = 32,
    margin: float = MARGIN,
    seed: int = 0,
    ends_at: float = math.inf,
) -> GateReport:
    """Run oracle, native engine and arm (flags of each) on prompts of token ids. Raises what the engines
    raise for flags that they refuse. `ends_at`: of time.monotonic; later gates are not run."""
    report = GateReport(num_prompts=len(prompts), num_tokens=num_tokens * len(prompts))
    with suppress(TimeLimitExceeded), time_limit(until(ends_at)):
        for gate in _gates(report, arm, native, oracle, prompts, num_tokens, margin, seed):
            report.gates.append(gate)
    report.num_not_run = len(GATES) - len(report.gates)
    return report


def _gates(
    report: GateReport,
    arm: dict[str, Any],
    native: dict[str, Any],
    oracle: dict[str, Any],
    prompts: Sequence[list[int]],
    num_tokens: int,
    margin: float,
    seed: int,
) -> Iterator[Gate]:
    """The gates, each as soon as its engines have run. Writes `same_best` of the report."""
    expected = _recorded(oracle, prompts, None, num_tokens)
    theirs = _recorded(native, prompts, expected.tokens, num_tokens)
    native_kl, (kl, nll, batch, prefix) = kl_by_prompt(expected, theirs), GATES
    llm = _engine(arm)
    is_exact = llm.config.deterministic
    together = record(llm, prompts, expected.tokens, num_tokens, may_end=True)
    best = [(a.argmax(1) == b.argmax(1)).mean() for a, b in zip(expected.logprobs, together.logprobs)]
    report.same_best = float(np.mean(best))
    own_kl = kl_by_prompt(expected, together)
    of_error = error_gate(kl, own_kl, native_kl, margin, seed)
    yield of_error
    errors = nll_by_prompt(expected, together), nll_by_prompt(expected, theirs)
    yield error_gate(nll, *errors, margin, seed, NLL_FLOOR)
    cached = record(llm, prompts, expected.tokens, num_tokens, may_end=True)
    llm.flush_cache()
    alone = record(llm, prompts, expected.tokens, num_tokens, together=False, may_end=True)
    allowed = allowed_errors(of_error, own_kl, kl_by_prompt(expected, alone), native_kl)
    yield invariance_gate(batch, alone, together, allowed, is_exact)
    yield invariance_gate(prefix, together, cached, allowed, is_exact)


def _engine(flags: dict[str, Any]) -> LLM:
    from diptych.shared.engine.llm import LLM

    return LLM(**flags)


def _recorded(
    flags: dict[str, Any],
    prompts: Sequence[list[int]],
    forced: Sequence[Sequence[int]] | None,
    num_tokens: int,
) -> Rows:
    llm = _engine(flags)
    rows = record(llm, prompts, forced, num_tokens)
    del llm
    gc.collect()  # the next engine needs the device's memory
    return rows
