"""Random schedules for schedulers: arrivals, aborts, retractions and the configuration.

Any correct scheduler gives every request the tokens that its prompt implies, under any schedule. With
sampling, penalties, stops or log-probabilities each request gets what it gets alone. A schedule is a value,
so a failing one can be shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal, expect_true
from diptych.shared.tools.conformance.oracles.answer_alone import EveryThird
from diptych.shared.tools.conformance.oracles.flag_space import draw_flags, draw_params
from diptych.shared.tools.conformance.oracles.ledger_drafter import erratic
from diptych.shared.tools.conformance.oracles.scheduler_harness import (
    VOCAB_SIZE,
    SchedulerHarness,
    shape_flags,
)
from diptych.shared.types import DraftShape, FinishAbort, FinishError, FinishLength

CONTEXT_LEN = 64
MAX_PROMPT_LEN = 40
POOL_PAGES = (3, 6, 12)
"""Pages of 16 tokens."""


@dataclass(frozen=True)
class Action:
    """One event of a schedule. `which` counts the requests submitted so far, modulo their number. For a fault
    ("spoil") it is the token whose KV becomes NaN when it is next computed."""

    kind: Literal["submit", "step", "abort", "retract", "flush", "spoil"]
    prompt: tuple[int, ...] = ()
    max_new_tokens: int = 0
    extra_key: str | None = None
    priority: int = 0
    routing_key: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams
    eos: frozenset[int] = frozenset()
    has_grammar: bool = False
    which: int = 0
    num_steps: int = 1


@dataclass(frozen=True)
class Drafts:
    """Speculation with random trees of this shape, from `seed`."""

    shape: DraftShape
    seed: int
    runs_ahead: bool = False

    def flags(self, is_spread: bool = False) -> dict[str, Any]:
        return {
            "guess": erratic(self.seed, is_spread),
            "runs_ahead": self.runs_ahead,
            **shape_flags(self.shape),
        }


@dataclass(frozen=True)
class Schedule:
    name: str
    actions: tuple[Action, ...]
    page_size: int = 1
    pool_pages_of_16: int = 6
    chunked_prefill_size: int | None = None
    enable_mixed_chunk: bool = False
    disable_radix_cache: bool = False
    schedule_policy: str = "fcfs"
    enable_priority_scheduling: bool = False
    eviction_policy: str = "lru"
    max_running_requests: int = 8
    max_prefill_tokens: int = 1000
    schedule_conservativeness: float = 1.0
    in_batch_prefix_check_threshold: int = 32
    in_batch_prefix_deprioritize_threshold: int = 32
    num_continuous_decode_steps: int = 1
    drafts: Drafts | None = None  # None: no speculation
    is_spread: bool = False  # logits close together, so that sampling parameters matter
    nan_token: int | None = None

    def __post_init__(self) -> None:
        if self.page_size not in (1, 2, 4, 8, 16) or self.pool_pages_of_16 < 3:
            raise ValueError("the pool holds at least the longest prompt, in whole pages")

    def flags(self) -> dict[str, Any]:
        own = ("name", "actions", "pool_pages_of_16", "drafts")
        flags = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return flags if self.drafts is None else flags | self.drafts.flags(self.is_spread)


def random_schedule(seed: int, num_actions: int = 40, is_spread: bool = False) -> Schedule:
    """Prompts of three different tokens, so that prefixes are shared often. `is_spread`: requests use all
    sampling parameters."""
    rng = random.Random(seed)
    return Schedule(
        name=f"random schedule {seed}",
        actions=tuple(_random_action(rng, is_spread) for _ in range(num_actions)),
        is_spread=is_spread,
        nan_token=rng.choice([None, None, 7]) if is_spread else None,
        **draw_flags(rng.choice, pool_pages_of_16=POOL_PAGES),
    )


def random_speculation(seed: int, runs_ahead: bool = False, is_spread: bool = False) -> Schedule:
    """A random schedule with speculation: random trees with random right nodes."""
    rng = random.Random(f"drafts {seed}")
    num_steps, top_k = rng.choice([1, 3, 5]), rng.choice([1, 2, 4])
    most = DraftShape(num_steps, top_k, 0).max_nodes
    shape = DraftShape(num_steps, top_k, most if top_k == 1 else min(rng.choice([2, 8, 16]), most))
    return replace(
        random_schedule(seed, is_spread=is_spread),
        name=f"random schedule {seed}, {shape}{', ahead' * runs_ahead}",
        enable_mixed_chunk=False,
        drafts=Drafts(shape, seed, runs_ahead),
    )


def random_faults(seed: int) -> Schedule:
    """A random schedule in which KV sometimes becomes NaN. (Prompts are not cut: a chunk that another request
    finds before the last one is known affects that request too.)"""
    rng = random.Random(f"faults {seed}")
    schedule = random_schedule(seed)
    actions: list[Action] = []
    for action in schedule.actions:
        if rng.random() < 0.3:
            actions.append(Action("spoil", which=rng.randint(1, 3)))
        actions.append(action)
    name = f"random schedule {seed}, with faults"
    return replace(schedule, name=name, actions=tuple(actions), chunked_prefill_size=None)


def _random_action(rng: random.Random, is_spread: bool) -> Action:
    kind = rng.choices(["submit", "step", "abort", "retract", "flush"], weights=[10, 10, 2, 2, 1])[0]
    if kind == "submit":
        return Action(
            "submit",
            prompt=tuple(rng.choices([1, 2, 3], k=rng.randint(1, MAX_PROMPT_LEN))),
            max_new_tokens=rng.randint(0, 30),
            extra_key=rng.choice([None, None, "a"]),
            priority=rng.choice([0, 0, 5, 20, 40]),
            routing_key=rng.choice([None, "x", "y"]),
            **(_random_params(rng) if is_spread else {}),
        )
    return Action(kind, which=rng.randrange(100), num_steps=rng.randint(1, 6))  # type: ignore[arg-type]


def _random_params(rng: random.Random) -> dict[str, Any]:
    """Random sampling parameters of a request with a prompt of at least one token and up to 30 output
    tokens."""
    params = draw_params(rng, VOCAB_SIZE)
    if rng.random() < 0.3:
        params["stop"] = rng.choice([("<1",), ("2><3",), ("<4><", "9>")])
    eos = frozenset(rng.sample(range(VOCAB_SIZE), 5)) if rng.random() < 0.5 else frozenset()
    return {"params": params, "eos": eos, "has_grammar": rng.random() < 0.15}


def run_schedule(schedule: Schedule, replace: Mapping[str, Any] | None = None) -> None:
    """Run the schedule to its end and check all invariants after every step. Raises `Mismatch` or
    `InvariantViolation`."""
    harness = SchedulerHarness(
        replace=replace,
        context_len=CONTEXT_LEN,
        pool_tokens=16 * schedule.pool_pages_of_16,
        **schedule.flags(),
    )
    num_faults = sum(action.kind == "spoil" for action in schedule.actions)
    aborted: set[str] = set()
    for action in schedule.actions:
        _play(action, harness, aborted)
    # A request takes at most one step per prompt token, one per output token, and some more after
    # retractions.
    harness.run(max_steps=200 + 300 * len(harness.reqs))
    for rid, req in harness.reqs.items():
        reason = harness.ended.get(rid)
        if schedule.is_spread:
            harness.expect_what_it_gets_alone(rid, may_be_aborted=rid in aborted)
        elif isinstance(reason, FinishAbort) and rid in aborted:
            harness.expect(rid, len(harness.tokens[rid]))
        elif isinstance(reason, FinishLength):
            harness.expect(rid, req.max_new_tokens)
        elif isinstance(reason, FinishError) and num_faults > 0:
            num_faults -= 1
            harness.expect(rid, len(harness.tokens[rid]))
        else:
            raise Mismatch(f"how {rid} ends", "its length", reason)
    cached = [slot for node in harness.tree_cache.nodes() for slot in node.slots]
    expect_true("no KV in the cache is NaN", not harness.model_runner.hashes[cached].isnan().any())
    harness.expect_idle()


def _play(action: Action, harness: SchedulerHarness, aborted: set[str]) -> None:
    rids = list(harness.reqs)
    rid = rids[action.which % len(rids)] if rids else None
    if action.kind == "submit" and action.prompt:
        harness.submit(
            action.prompt,
            action.max_new_tokens,
            extra_key=action.extra_key,
            priority=action.priority,
            routing_key=action.routing_key,
            eos=action.eos,
            grammar=EveryThird() if action.has_grammar else None,
            **action.params,
        )
    elif action.kind == "step":
        for _ in range(action.num_steps):
            harness.step()
    elif action.kind == "abort" and rid is not None:
        is_alive = not harness.reqs[rid].finished
        expect_equal(f"abort({rid})", harness.scheduler.abort(rid), is_alive)
        aborted |= {rid} if is_alive else set()
    elif action.kind == "retract" and rid is not None:
        harness.scheduler.retract(rid)
    elif action.kind == "spoil":
        harness.model_runner.spoil_token = action.which
    elif action.kind == "flush":
        is_idle = all(req.finished for req in harness.reqs.values())
        expect_equal("flush_cache()", harness.scheduler.flush_cache(), is_idle)
