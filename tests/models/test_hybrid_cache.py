"""States in the prefix cache: a hit of any length gives the answer of a cold run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import hf_greedy, random_hf_model

from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import RadixKey
from diptych.shared.interfaces.linear_attention import StateStore
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import Req, SamplingParams
from tests.planted import Bug, Bugs

NUM_NEW = 12
GRID = 8


def tokens(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=["reference", pytest.param("optimized", marks=pytest.mark.full)])
def panel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def hf_model(name: str = "qwen3.5") -> Any:
    """Its states decay slowly, so that answers depend on them after dozens of tokens."""
    model = random_hf_model(HYBRID_CONFIGS[name])
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.sub_(6.0)
    return model


@cache
def answer_of(prompt: tuple[int, ...], name: str = "qwen3.5") -> list[int]:
    return hf_greedy(hf_model(name), list(prompt), NUM_NEW)[0]


class Engine:
    """An engine over the smallest model, on a grid of 8 tokens, and the right answers."""

    def __init__(self, folder: Path, panel: str, name: str = "qwen3.5", **flags: Any) -> None:
        self.name = name
        hf_model(name).save_pretrained(folder)
        fields = {"max_total_tokens": 1024, "check_invariants": True, "max_running_requests": 8}
        fields = {**fields, "max_kept_states": 32, **flags}
        self.llm = LLM(model=str(folder), device="cpu", panel=panel, **fields)
        found = [each for each in self.llm.scheduler.parts.features if isinstance(each, StateCheckpoints)]
        self.states = found[0] if found else None

    def ask(self, *prompts: list[int], num_new: int = NUM_NEW, **fields: Any) -> list[int]:
        """Check the answers; the number of tokens that came from the cache, for each prompt."""
        params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
        outputs = self.llm.generate(list(prompts), params, progress=False, **fields)
        for prompt, output in zip(prompts, outputs):
            assert output.output_ids == answer_of(tuple(prompt), self.name)[:num_new]
        return [output.num_cached_tokens for output in outputs]


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "GRID", GRID)
    monkeypatch.setattr(state_checkpoints, "ROLLING", 2 * GRID)


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("kimi-linear", marks=pytest.mark.full)])
def test_hits(tmp_path: Path, panel: str, name: str) -> None:
    """The same prompt again, a longer one, one that parts from it, that one again, and what follows an
    answer. Which of them hit, and how deep, is exact: a cache that finds nothing fails, too."""
    engine, prompt = Engine(tmp_path, panel, name), tokens(30)
    assert engine.ask(prompt) == [0]
    assert engine.ask(prompt) == [24]
    assert engine.ask([*prompt, *tokens(9, seed=2)]) == [24]
    other = [*prompt[:20], *tokens(14, seed=3)]
    assert engine.ask(other) == [0]  # no state where they part
    assert engine.ask([*prompt[:20], *tokens(14, seed=4)]) == [16]  # the second one left one there
    assert engine.ask(tokens(8, seed=5)) == [0]
    assert engine.ask(tokens(8, seed=5)) == [0]  # the last token is always computed
    assert engine.ask(tokens(9, seed=5)) == [0]
    answer = answer_of(tuple(prompt), name)
    assert engine.ask([*prompt, *answer, *tokens(3)]) == [32]  # its rolling checkpoint


@pytest.mark.parametrize(
    "flags", [{"page_size": 4}, {"page_size": 16}, {"chunked_prefill_size": 16}], ids=str
)
@pytest.mark.full
def test_every_length(flags: dict[str, Any], tmp_path: Path, panel: str) -> None:
    engine, prompt = Engine(tmp_path, panel, **flags), tokens(41)
    for end in range(17, 42, 6):
        engine.ask(prompt[:end], num_new=3)
    assert engine.ask(prompt, num_new=3) == [32 if flags.get("page_size") == 16 else 40]


def test_too_few_states(tmp_path: Path, panel: str) -> None:
    """With one state a later prompt takes it; with none there are no hits, and no failure."""
    engine, first, second = Engine(tmp_path / "a", panel, max_kept_states=1), tokens(20), tokens(20, seed=2)
    assert [engine.ask(prompt) for prompt in (first, first, second, first)] == [[0], [16], [0], [0]]
    engine = Engine(tmp_path / "b", panel, max_kept_states=0)
    assert [engine.ask(first), engine.ask(first)] == [[0], [0]]


def test_states_and_kv_are_evicted_apart(tmp_path: Path, panel: str) -> None:
    engine, prompt = Engine(tmp_path, panel, max_total_tokens=64), tokens(30)
    assert engine.ask(prompt, tokens(30, seed=2)) == [0, 0]  # one at a time: KV of the first one is evicted
    engine.llm.scheduler.parts.tree_cache.evict(64)
    assert engine.states is not None
    assert engine.states.table
    assert engine.ask(prompt) == [0]  # a state without KV
    assert engine.ask(prompt) == [24]
    engine.states.forget_all_kept()
    assert engine.ask(prompt) == [0]  # KV without a state
    assert engine.ask(prompt) == [24]


@pytest.mark.full
def test_retracted_and_aborted(tmp_path: Path, panel: str) -> None:
    """At every step of a request; what stays behind are whole states, and everything has one owner."""
    engine, prompt = Engine(tmp_path, panel, chunked_prefill_size=16), tokens(40)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    expected = answer_of(tuple(prompt))
    for steps in (1, 2, 3, 5, 9):
        collector = engine.llm.submit(prompt, params)[0]
        for _ in range(steps):
            engine.llm.step()
        engine.llm.scheduler.retract(collector.scheduler_rid)
        while engine.llm.scheduler.has_work():
            engine.llm.step()
        assert collector.output_ids == expected
        collector = engine.llm.submit(tokens(40, seed=steps), params)[0]
        for _ in range(steps):
            engine.llm.step()
        engine.llm.abort(collector.rid)
        engine.ask(prompt)
        assert engine.states is not None
        engine.states.check()
        assert not engine.states.orders


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_make_way(temperature: float, tmp_path: Path, panel: str) -> None:
    """Each of n samples has a state of its own; one is preempted, and goes on later."""
    engine = Engine(tmp_path, panel, max_running_requests=3, enable_priority_scheduling=True)
    prompt, urgent = tokens(30), tokens(20, seed=2)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature, seed=3, n=3, ignore_eos=True)
    alone = [each.output_ids for each in engine.llm.generate(prompt, params, progress=False)]
    if temperature:
        assert len(set(map(tuple, alone))) == 3
    else:
        assert alone == [answer_of(tuple(prompt))] * 3
    samples = engine.llm.submit(prompt, params)
    for _ in range(4):
        engine.llm.step()
    (first,) = engine.llm.submit(urgent, replace(params, temperature=0.0, n=1), priority=100)
    while engine.llm.scheduler.has_work():
        engine.llm.step()
    assert engine.llm.scheduler.stats().num_retractions == 1
    assert [first.output_ids, *(each.output_ids for each in samples)] == [answer_of(tuple(urgent)), *alone]


@pytest.mark.full
def test_many_at_once(tmp_path: Path, panel: str) -> None:
    """Shared prefixes, n answers of one prompt, mixed steps, short memory and few states."""
    flags = {"max_total_tokens": 160, "schedule_conservativeness": 0.01, "enable_mixed_chunk": True}
    engine = Engine(tmp_path, panel, chunked_prefill_size=24, max_kept_states=5, **flags)
    shared = tokens(19)
    prompts = [[*shared, *tokens(5 + 4 * i, seed=i)] for i in range(6)]
    for _ in range(2):
        engine.ask(*prompts, *prompts[:2])
    assert engine.llm.scheduler.stats().num_retractions > 0
    assert engine.llm.scheduler.stats().num_cached_tokens > 0


@pytest.mark.full
def test_namespaces(tmp_path: Path, panel: str) -> None:
    engine, prompt = Engine(tmp_path, panel), tokens(30)
    assert [engine.ask(prompt, extra_key=key) for key in ("a", "b", "a")] == [[0], [0], [24]]


@pytest.mark.full
def test_flush_and_failed_steps(tmp_path: Path, panel: str) -> None:
    engine, prompt = Engine(tmp_path, panel), tokens(30)
    engine.ask(prompt)
    assert engine.llm.scheduler.flush_cache()
    assert engine.ask(prompt) == [0]
    runner: Any = engine.llm.scheduler.parts.model_runner
    working = runner.forward
    runner.forward = lambda batch: 1 / 0
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    failed = engine.llm.generate([tokens(30, seed=2)], params, progress=False)
    assert failed[0].output_ids == []
    runner.forward = working
    assert engine.ask(tokens(30, seed=2)) == [0]
    assert engine.ask(prompt) == [24]


def _every_kv(states: StateCheckpoints, key: RadixKey, num_tokens: int) -> int:
    """A match needs KV alone."""
    return num_tokens // states.grid * states.grid


def _a_step_too_far(states: StateCheckpoints, req: Req, store: StateStore) -> None:
    """A state is stored one token behind its position."""
    ORDER(states, req, store)
    store.position += 1


def _loads_nothing(states: StateCheckpoints, req: Req) -> None:
    """A request behind a prefix goes on from what its row holds."""
    BEGIN(states, req)
    states.pool.loads.clear()


def _keeps_checkpoints(states: StateCheckpoints, req: Req) -> None:
    """The checkpoints of an aborted request have no owner."""
    states.orders.pop(req, None)


def _unlike_namespaces(states: StateCheckpoints, token_ids: list[int], extra_key: Any) -> list[str]:
    """States are found by the tokens of the last grid step alone."""
    return [
        str(token_ids[n : n + states.grid]) for n in range(0, len(token_ids) - states.grid + 1, states.grid)
    ]


def _keeps_after_nan(states: StateCheckpoints) -> None:
    """States of a prompt whose logits are NaN are found again."""


ORDER, BEGIN = StateCheckpoints._order, StateCheckpoints._begin
BUGS = Bugs("state checkpoints", finder="_some_requests")
for _place, _bug in {
    "longest": _every_kv,
    "_order": _a_step_too_far,
    "_begin": _loads_nothing,
    "forget": _keeps_checkpoints,
    "digests": _unlike_namespaces,
    "forget_all_kept": _keeps_after_nan,
}.items():
    BUGS.add_all(_bug, where=f"{StateCheckpoints.__module__}.StateCheckpoints.{_place}")


def _some_requests(engine: Engine) -> None:
    prompt = tokens(30)
    engine.ask(prompt)
    engine.ask(prompt)
    for seed in (2, 3, 4, 5):
        same_end = tokens(16, seed=seed) + prompt[16:]  # its last grid step is that of `prompt`
        engine.ask(same_end)
        engine.ask(same_end)
    engine.ask(prompt[:20] + tokens(9, seed=4))
    collector = engine.llm.submit(tokens(30, seed=3), SamplingParams(max_new_tokens=9))[0]
    engine.llm.step()
    engine.llm.abort(collector.rid)
    engine.ask(prompt)
    weight = next(engine.llm.assembly.model.parameters()).data
    weight.copy_((right := weight.clone()) * torch.nan)
    poisoned = [*prompt[:10], *tokens(20, seed=6)]  # the chunk before its NaN leaves a state
    engine.llm.generate([poisoned], max_tokens=1, progress=False)
    weight.copy_(right)
    engine.ask(poisoned)  # brings KV back
    engine.ask(poisoned[:20])


@BUGS.found_by(AssertionError, KeyError, is_fast=lambda *_: False, honest=True)
def test_planted_bugs(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant_in(monkeypatch)
    _some_requests(Engine(tmp_path, "reference", chunked_prefill_size=16))
