"""Runs a component's clauses against an implementation and gives a verdict for each case."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.shared import registry
from diptych.shared.engine.build.component_check import interface_of, problem_with
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import Clause, clauses_in
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.shrink import shrink
from diptych.shared.tools.conformance.clauses.time_limit import TimeLimitExceeded
from diptych.shared.tools.conformance.clauses.time_limit import time_limit as limit_time

CONTRACTS: dict[str, tuple[str, ...]] = {
    "schedule_policy": ("schedule_policy.order", "schedule_policy.passes"),
    "prefill_adder": ("prefill_adder.budgets", "prefill_adder.waits", "prefill_adder.any_requests"),
    "scheduler": (
        "scheduler.schedules",
        "scheduler.steps_together",
        "scheduler.limits",
        "scheduler.answers",
        "scheduler.constraints",
        "scheduler.failures",
        "scheduler.faults",
        "scheduler.other_engines",
        "scheduler.speculation",
        "scheduler.speculation_limits",
        "scheduler.speculation_ahead",
    ),
    "memory_pool": (
        "memory_pool.rows",
        "memory_pool.kv_pool",
        "memory_pool.fp8_pool",
        "memory_pool.allocator",
        "memory_pool.allocator_free",
        "memory_pool.allocator_sequences",
    ),
    "radix_cache": (
        "radix_cache.match_and_insert",
        "radix_cache.locks",
        "radix_cache.eviction",
        "radix_cache.discard",
        "radix_cache.sequences",
        "radix_cache.requests",
        "radix_cache.request_lives",
    ),
    "chunk_cache": ("chunk_cache.requests", "radix_cache.request_lives"),
    "kv_cache": ("kv_cache.rows", "kv_cache.passes"),
    "linear_attention": (
        *("linear_attention.recurrence", "linear_attention.checkpoints", "linear_attention.independence"),
    ),
    "attention": (
        "attention.batches",
        "attention.layers",
        "attention.masks",
        "attention.steps",
        "attention.outputs",
        "attention.ragged",
        "attention.independence",
        "attention.fp8_pool",
    ),
    "mla_memory_pool": ("mla_memory_pool.rows",),
    "mla_attention": ("mla_attention.batches",),
    "layers": ("layers.norm_and_activation", "layers.rotary"),
    "quantization": ("quantization.linear",),
    "quantized_experts": ("quantized_experts.outputs",),
    "host_pool": ("host_pool.copies",),
    "disk_tier": ("disk_tier.files",),
    "lora": ("lora.outputs",),
    "moe": ("moe.routing", "moe.experts"),
    "models": ("models.logits", "models.input_rows", "models.weights"),
    "draft_models": ("draft_models.forward", "draft_models.weights"),
    "vision": ("vision.rows",),
    "model_runner": (
        "model_runner.forward",
        "model_runner.decode",
        "model_runner.verify",
        "model_runner.extend",
    ),
    "sampler": (
        "sampler.steps",
        "sampler.rows",
        "sampler.logprobs",
        "sampler.near_ties",
        "sampler.distribution",
    ),
    "drafter": ("drafter.drafting", "drafter.blocks", "drafter.shared_ngrams", "drafter.sent_state"),
    "draft_tree": ("draft_tree.links_and_acceptance", "draft_tree.drafting"),
    "detokenizer": ("detokenizer.pieces", "detokenizer.ends"),
    "dialect": ("dialect.reading",),
    "expert_balancer": ("expert_balancer.placement",),
    "expert_dispatch": ("expert_dispatch.outputs",),
    "transport": ("transport.transfers",),
    "collectives": ("collectives.operations", "collectives.groups"),
}
"""component -> the modules of diptych.shared.tools.conformance.contracts that hold its clauses"""

TIME_LIMIT = 30.0
"""Seconds for one case: the slowest of ours takes about a second."""


@dataclass(frozen=True)
class Failure:
    what: str
    expected: object
    actual: object
    smallest_case: Any


@dataclass(frozen=True)
class Verdict:
    clause: Clause
    case: Any
    failure: Failure | None

    @property
    def holds(self) -> bool:
        return self.failure is None


def clauses_of(component: str) -> list[Clause]:
    """A component's clauses; an unknown component raises `ValueError` listing the known."""
    if component not in CONTRACTS:
        raise ValueError(f"no contract for {component!r}; there are contracts for {', '.join(CONTRACTS)}")
    modules = [
        importlib.import_module(f"diptych.shared.tools.conformance.contracts.{name}")
        for name in CONTRACTS[component]
    ]
    return [clause for module in modules for clause in clauses_in(module)]


def check_component(
    component: str,
    target: str,
    *,
    clauses: Sequence[Clause] | None = None,
    shrink_failures: bool = True,
    time_limit: float | None = TIME_LIMIT,
) -> Iterator[Verdict]:
    """Every clause (or only `clauses`) and case of a component against `target`: a panel, a backend's name,
    package.module:Class or file.py:Class. A target that cannot be found or loaded, or cannot run on this
    machine, raises `ValueError` at the call. A target that does not implement the interface fails the clause
    of the interface; no other clause is run."""
    chosen = clauses_of(component) if clauses is None else list(clauses)
    registry.check_choice(component, target)
    registry.check_device({component: target}, check_device().type)
    impl = registry.load(component, target)
    reference = registry.load(component, "reference")
    return _check_interface_first(component, chosen, impl, reference, shrink_failures, time_limit)


def check_implementation(
    clauses: Sequence[Clause],
    impl: Any,
    reference: Any,
    *,
    shrink_failures: bool = True,
    time_limit: float | None = TIME_LIMIT,
) -> Iterator[Verdict]:
    """Yields one verdict for each case, clause by clause. The first failing case of a clause is shrunk. A
    case takes at most `time_limit` seconds (see there), and so does shrinking. After a clause has reached the
    limit, its other cases are skipped, as each could take as long."""
    for clause in clauses:
        is_first = True
        for case in clause.cases:
            error = _error_of(clause, impl, case, reference, time_limit)
            if error is None:
                yield Verdict(clause, case, None)
                continue
            smallest = case
            is_late = isinstance(error, TimeLimitExceeded)
            if shrink_failures and is_first and not is_late:
                smallest = _smallest(clause, impl, case, reference, time_limit)
                error = _error_of(clause, impl, smallest, reference, time_limit) or error
            is_first = False
            yield Verdict(clause, case, _failure(error, smallest, time_limit))
            if is_late:
                break


def interface_clause(component: str) -> Clause:
    """`problem_with` as a clause, so that its verdict is reported like any other."""

    def check(impl: Any, case: Case) -> None:
        problem = problem_with(component, impl)
        if problem is not None:
            raise Mismatch("interface", f"an implementation of {case.name}", problem)

    interface = interface_of(component)
    wanted = interface if isinstance(interface, tuple) else (interface,)
    names = ", ".join(f"diptych.shared.interfaces.{one.__name__}" for one in wanted) or "a module of models"
    statement = f"It implements {names}: a subclass, no method missing."
    return Clause("implements-the-interface", statement, (Case(names),), check, "contract")


def _check_interface_first(
    component: str,
    clauses: Sequence[Clause],
    impl: Any,
    reference: Any,
    shrink_failures: bool,
    time_limit: float | None,
) -> Iterator[Verdict]:
    (verdict,) = check_implementation([interface_clause(component)], impl, reference, time_limit=None)
    yield verdict
    if verdict.holds:
        yield from check_implementation(
            clauses, impl, reference, shrink_failures=shrink_failures, time_limit=time_limit
        )


def _smallest(clause: Clause, impl: Any, case: Any, reference: Any, seconds: float | None) -> Any:
    """The smallest failing case near `case` that is found within `seconds`."""
    end = None if seconds is None else time.monotonic() + seconds

    def fails_here_only(candidate: Any) -> bool:
        """Whether the implementation fails and the reference does not: a case that both fail is
        meaningless."""
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return False
        if _error_of(clause, reference, candidate, reference, left) is not None:
            return False
        error = _error_of(clause, impl, candidate, reference, left)
        return error is not None and not isinstance(error, TimeLimitExceeded)

    return shrink(case, fails_here_only)


def _error_of(
    clause: Clause, impl: Any, case: Any, reference: Any, seconds: float | None
) -> BaseException | None:
    try:
        with limit_time(seconds):
            clause.run(impl, case, reference)
    # Any unexpected exception is a failure of the implementation, SystemExit included.
    except (Exception, SystemExit, TimeLimitExceeded) as error:
        return error
    return None


def _failure(error: BaseException, case: Any, seconds: float | None) -> Failure:
    if isinstance(error, Mismatch):
        return Failure(error.what, error.expected, error.actual, case)
    if isinstance(error, TimeLimitExceeded):
        return Failure("time limit", f"an end within {seconds:g} s", "none", case)
    return Failure("raised", "no exception", f"{type(error).__name__}: {error} ({_place(error)})", case)


def _place(error: BaseException) -> str:
    """Where an exception was raised: the innermost line of Python."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"
