"""Which start of the engine a configuration gets, and what is called on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.processes import disaggregated, launcher, ranks, replicas, replicas_in_step, start
from diptych.shared.parallel import meeting

STARTS = (
    (start, "assemble"),
    (disaggregated, "assemble_disaggregated"),
    (launcher, "assemble_launched"),
    (ranks, "assemble_ranks"),
    (replicas, "assemble_replicas"),
    (replicas_in_step, "assemble_in_step"),
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "assemble"),
        ({"tp": 2}, "assemble_ranks"),
        ({"pp": 2}, "assemble_ranks"),
        ({"dp": 2}, "assemble_replicas"),
        ({"dp": 2, "tp": 2}, "assemble_replicas"),
        ({"dp": 2, "dp_attention": True}, "assemble_in_step"),
        ({"disaggregation": True}, "assemble_disaggregated"),
    ],
)
@pytest.mark.parametrize("is_launched", [False, True])
def test_which_start(
    flags: dict[str, Any], expected: str, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in STARTS:
        monkeypatch.setattr(module, name, lambda *_, name=name: name)
    monkeypatch.setattr(meeting, "is_launched", lambda: is_launched)
    if is_launched and expected == "assemble_ranks":
        expected = "assemble_launched"
    assert start._started(EngineConfig(**flags)) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, False),
        ({"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "1"}, False),
        ({"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, True),
    ],
    ids=["no launcher", "another tool", "one rank", "two ranks"],
)
def test_what_a_launcher_leaves(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[int] = []
    monkeypatch.setattr(launcher, "_follow_rank_0", lambda config: followed.append(1))
    for name in meeting.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert meeting.is_launched() == expected
    launcher.follow_if_launched(EngineConfig())
    assert not followed, "rank 0 leads"
    if environment:
        monkeypatch.setenv("RANK", "1")
        launcher.follow_if_launched(EngineConfig())
        assert bool(followed) == expected


def test_a_launcher_that_starts_another_number_of_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"has started 3 ranks \(WORLD_SIZE\); tp \* pp is 2"):
        launcher.assemble_launched(EngineConfig(tp=2))


@pytest.mark.parametrize(
    ("num_ranks", "dp", "on_all"), [(1, 1, False), (2, 1, True), (2, 2, False), (1, 2, False)]
)
def test_a_function_on_every_rank(num_ranks: int, dp: int, on_all: bool) -> None:
    scheduler = SimpleNamespace(run=lambda function, assembly, *arguments: ("all", *arguments))
    config = SimpleNamespace(num_ranks=num_ranks, dp=dp)
    assembly: Any = SimpleNamespace(config=config, scheduler=scheduler)
    found = start.on_every_rank(assembly, lambda assembly, *arguments: ("here", *arguments), 7)
    assert found == ("all" if on_all else "here", 7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "no-such-model"}, "no model 'no-such-model'"),
        ({"model": "Qwen3-8B"}, "is a shape without weights"),
        ({"device": "tpu"}, "device must be cpu, mps, cuda"),
        ({"context_len": 4096}, "context_len=4096 exceeds the model's 2048"),
        ({"page_size": 0}, "page_size must be an integer >= 1"),
        ({"nonsense": 1}, "unknown flag nonsense"),
        ({"use": {"attention": "triton_x"}}, "attention=triton_x: no such implementation"),
        ({"use": {"nothing": "reference"}}, "unknown component 'nothing'"),
        ({"max_total_tokens": 8, "page_size": 16}, "no room for a KV pool"),
        ({"chunked_prefill_size": 4, "page_size": 16}, "chunk"),
    ],
)
def test_bad_flags(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": "tiny-dense", "device": "cpu", "panel": "reference", **flags})
