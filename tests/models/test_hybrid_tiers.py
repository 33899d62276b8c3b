"""States below the device: KV that comes back from CPU memory is of use up to the last state that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_hybrid_cache import Engine, answer_of, tokens

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.scheduling.host_states import HostStates
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from tests.planted import Bug, Bugs

HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder", "host_pool")
OVERLAP = {"use": dict.fromkeys((*HOST_PARTS, "model_runner", "attention", "linear_attention"), "optimized")}
PROMPT = tokens(50)


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of one page of CPU memory."""
    monkeypatch.setattr(state_checkpoints, "GRID", 16)
    monkeypatch.setattr(state_checkpoints, "ROLLING", 16)


class Tiers(Engine):
    def __init__(self, folder: Path, name: str = "qwen3.5", **flags: Any) -> None:
        super().__init__(folder, "reference", name, **{"hicache_tokens": 4096, **flags})
        self.tree: Any = self.llm.scheduler.parts.tree_cache
        assert self.states is not None
        self.device_states: StateCheckpoints = self.states

    def evict(self, kv: bool = True, states: bool = True) -> None:
        """From the device; what is overwritten there later is NaN."""
        if kv:
            self.tree.evict(self.tree.evictable_size())
            free = self.llm.assembly.parts.allocator.free_slots()
            pool: Any = self.llm.assembly.kv_pool
            for layer in range(pool.num_layers):
                pool.k_buffer(layer)[free] = torch.nan
        if states:
            self.device_states.forget_all_kept()
            for buffer in (self.device_states.pool.inputs, self.device_states.pool.recurrent):
                buffer[:, list(self.device_states.free)] = torch.nan


@pytest.mark.parametrize(
    "name", ["qwen3.5", "kimi-linear", pytest.param("qwen3-next", marks=pytest.mark.full)]
)
def test_what_was_evicted_comes_back(name: str, tmp_path: Path) -> None:
    """KV, states, or both; how deep each hit is, is exact."""
    engine = Tiers(tmp_path, name)
    assert engine.ask(PROMPT) == [0]
    for kv, states in ((True, True), (True, False), (False, True)):
        engine.evict(kv, states)
        assert engine.ask(PROMPT) == [48]
    answer = answer_of(tuple(PROMPT), name)
    engine.evict()
    assert engine.ask([*PROMPT, *answer, *tokens(9, seed=2)]) == [48]
    engine.evict()
    other = [*PROMPT[:40], *tokens(9, seed=3)]
    assert engine.ask(other) == [0]  # KV of 32 tokens has come back before, and no state of them
    engine.evict()
    assert engine.ask(PROMPT, other) == [48, 48]


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 4, "chunked_prefill_size": 24},
        {"max_kept_states": 1},
        {"max_total_tokens": 96, "schedule_conservativeness": 0.01},
        {"hicache_tokens": 64},
        {"num_continuous_decode_steps": 2},
        {"speculative": "ngram", "speculative_topk": 1},
        pytest.param(OVERLAP, marks=pytest.mark.skipif(not INTERPRETED, reason="runs kernels on a CPU")),
    ],
    ids=str,
)
def test_answers_while_states_come_and_go(flags: dict[str, Any], tmp_path: Path) -> None:
    """Few states, retractions, pages that are forgotten: the answers of a cold engine."""
    engine = Tiers(tmp_path, **flags)
    shared = PROMPT[:34]
    prompts = [PROMPT, [*shared, *tokens(9, seed=1)], [*shared, *tokens(17, seed=2)], tokens(40, seed=3)]
    few = 2 if flags is OVERLAP else 4
    for _ in range(2):
        engine.ask(*prompts[:few], num_new=4)
        engine.evict()
    assert sum(engine.ask(*prompts[:few], num_new=4)) or "hicache_tokens" in flags
    assert engine.llm.scheduler.flush_cache()
    assert engine.ask(PROMPT, num_new=4) == [0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hicache_dir": "kv"}, "hicache_dir does not work with linear attention"),
        (
            {"max_kept_states": 0},
            "hicache_tokens=4096 does not work with linear attention and max_kept_states=0",
        ),
    ],
)
def test_what_is_refused(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Tiers(tmp_path, **flags)


def test_memory_of_states_counts(tmp_path: Path) -> None:
    engine = Tiers(tmp_path)
    page = engine.tree.host.pool.buffers[0].nbytes * 2
    states = sum(buffer.nbytes for buffer in engine.tree.host.state_pool.buffers)
    assert page // 4 < states <= max(page // 2, engine.device_states.pool.num_bytes_per_state)


def _of_another_request(self: HostStates, digest: str, checkpoint: int) -> None:
    """The state of another prefix is loaded."""
    LOAD(self, next(iter(self.pages)), checkpoint)


def _left_behind(self: HostStates, digest: str, checkpoint: int) -> None:
    """KV comes back alone; the checkpoint is what it was."""


def _later(self: HostStates, digest: str, checkpoint: int) -> None:
    """The copies of earlier states become copies of a later one."""
    STORE(self, digest, checkpoint)
    for page in self.pages.values():
        self.pool.store([page], torch.tensor([checkpoint]))


def _takes_what_is_pinned(self: StateCheckpoints) -> int | None:
    """The state that a joining request begins with makes room for that of another one."""
    return self.free.pop() if self.free else self.table.popitem(last=True)[1] if self.table else None


def _keeps_after_nan(self: HostStates) -> None:
    """States in CPU memory outlive their KV."""


LOAD, STORE = HostStates.load, HostStates.store
_PLACES = {
    _of_another_request: "host_states.HostStates.load",
    _left_behind: "host_states.HostStates.load",
    _later: "host_states.HostStates.store",
    _takes_what_is_pinned: "state_checkpoints.StateCheckpoints._take",
    _keeps_after_nan: "host_states.HostStates.clear",
}
BUGS = Bugs("states in CPU memory", finder="answers, hits and owners")
for _bug, _place in _PLACES.items():
    BUGS.add_all(_bug, where=f"diptych.shared.scheduling.{_place}")


@BUGS.found_by(AssertionError, KeyError, honest=True)
def test_planted_bugs(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant_in(monkeypatch)
    engine, second = Tiers(tmp_path, max_kept_states=1), tokens(50, seed=2)
    engine.ask(second)
    engine.ask(PROMPT)
    for prompts, hits in (((PROMPT,), [48]), ((second, PROMPT), [48, 0])):
        engine.evict()
        assert engine.ask(*prompts) == hits  # there is room for one state
    engine.ask(PROMPT[:34])
    engine.evict(kv=True, states=False)
    engine.ask([*PROMPT[:36], *second])
    assert engine.llm.scheduler.flush_cache()
    assert not engine.tree.host.kept.pages
