"""Drafts for models with linear attention: the text is that of plain decoding, whatever is accepted."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import hf_greedy, random_hf_model

from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import Drafter, StatePool
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, SamplingParams
from tests.planted import Bug, Bugs

NUM_NEW = 14
GRAPHS = "tests.model_runner.fake_graphs:FakeGraphsRunner"


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [tokens(30, 1), tokens(19, 2), tokens(1, 3), tokens(41, 4), [*tokens(30, 1), *tokens(4, 5)]]


@cache
def hf_model(name: str) -> Any:
    """Its states decay slowly, so that a wrong one shows after dozens of tokens."""
    model = random_hf_model(HYBRID_CONFIGS[name])
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.data.sub_(6.0)
    return model


@cache
def answers(name: str) -> list[list[int]]:
    return [hf_greedy(hf_model(name), prompt, NUM_NEW)[0] for prompt in PROMPTS]


class KnowsAnswers(Drafter):
    """Drafts the right tokens, but at each third position a wrong one. It reads tensors alone."""

    runs_ahead = True
    name = "qwen3.5"

    def __init__(self, config: Any, parts: Any) -> None:
        self.draft_tree = parts.component("draft_tree")()

    def extend(
        self, reqs: Any, forward_batch: ForwardBatch, hidden_states: Any, next_token_ids: torch.Tensor
    ) -> None:
        """It has no KV."""

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        bs, num_nodes = batch.batch_size, shape.num_draft_tokens
        texts = torch.zeros(bs, 128, dtype=torch.int64)
        for row, req in zip(texts, batch.reqs):
            text = req.origin_input_ids + answers(self.name)[PROMPTS.index(req.origin_input_ids)]
            row[: len(text)] = torch.tensor(text)
        columns = batch.seq_lens[:, None] + torch.arange(1, num_nodes)
        drafts = torch.where(columns % 3 == 0, 7, texts.gather(1, columns))
        ids = torch.cat((batch.root_ids[:, None], drafts), dim=1)
        parents = (torch.arange(num_nodes) - 1).repeat(bs, 1)
        return self.draft_tree.from_parents(ids, parents, torch.full((bs,), num_nodes))


def engine(folder: Path, panel: str, name: str = "qwen3.5", **flags: Any) -> LLM:
    hf_model(name).save_pretrained(folder)
    fields = {"max_total_tokens": 1024, "max_running_requests": 8, "check_invariants": True}
    fields["max_kept_states"] = 8
    fields |= {"speculative": "ngram", "speculative_topk": 1, "speculative_num_steps": 4, **flags}
    fields["use"] = {"drafter": f"{__name__}:KnowsAnswers", **fields.get("use", {})}
    return LLM(model=str(folder), device="cpu", panel=panel, **fields)


def check_answers(llm: LLM, which: list[int], name: str = "qwen3.5") -> list[int]:
    """The number of tokens that came from the cache, for each prompt."""
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([PROMPTS[i] for i in which], params, progress=False)
    assert [output.output_ids for output in outputs] == [answers(name)[i] for i in which]
    return [output.num_cached_tokens for output in outputs]


def check_all(llm: LLM, *batches: list[int]) -> None:
    for which in batches:
        check_answers(llm, which)


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "GRID", 8)


FLAGS: list[dict[str, Any]] = [
    {"page_size": 4, "chunked_prefill_size": 16},
    {"page_size": 16, "speculative_auto": True},
    # memory is short: requests are retracted, and there are plain steps between rounds
    {"max_total_tokens": 130, "schedule_conservativeness": 0.01},
    {"use": {"drafter": "reference"}, "max_running_requests": 2},
]


@pytest.mark.parametrize("panel", ["reference", pytest.param("optimized", marks=pytest.mark.full)])
@pytest.mark.parametrize("flags", [FLAGS[0], *(pytest.param(f, marks=pytest.mark.full) for f in FLAGS[1:])])
def test_text(flags: dict[str, Any], panel: str, tmp_path: Path) -> None:
    """Twice: a second run begins with states of the prefix cache, on rows that hold nodes of others."""
    llm = engine(tmp_path, panel, **flags)
    assert check_answers(llm, [0, 1, 2, 3])[0] == 0
    stats = llm.scheduler.stats()
    if "drafter" not in flags.get("use", {}):
        assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_drafted_tokens
    cached = check_answers(llm, [4, 3, 0])
    if flags.get("max_total_tokens"):
        assert stats.num_retractions > 0
    else:
        assert all(n > 0 for n in cached)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3.5", {"use": {"model_runner": GRAPHS}, "cuda_graph_bs": (1, 4)}),
        ("qwen3-next", {"use": {"model_runner": GRAPHS}, "cuda_graph_bs": (2, 4), "speculative_auto": True}),
        ("kimi-linear", {"use": {"model_runner": GRAPHS}, "cuda_graph_bs": (1, 4)}),
        ("qwen3.5", {"disable_overlap_schedule": True}),
        ("qwen3.5", {"use": {"linear_attention": "reference"}}),
    ],
    ids=str,
)
def test_graphs_and_overlap(
    name: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnowsAnswers, "name", name)
    llm = engine(tmp_path, "optimized", name, **flags)
    for which in ([0, 2, 1], [0]):
        check_answers(llm, which, name)
    runner: Any = llm.assembly.parts.model_runner
    assert (runner.replays.steps > 0) == ("model_runner" in flags.get("use", {}))
    stats = llm.scheduler.stats()
    assert (stats.num_overlapped > 0) != flags.get("disable_overlap_schedule", False)


@pytest.mark.full
def test_aborted_and_retracted(tmp_path: Path) -> None:
    """At every step; everything has one owner afterwards."""
    llm = engine(tmp_path, "reference")
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    (states,) = (each for each in llm.scheduler.parts.features if isinstance(each, StateCheckpoints))
    for steps in range(1, 6):
        collectors = [llm.submit(PROMPTS[i], params)[0] for i in (1, 3)]
        for _ in range(steps):
            llm.step()
        llm.abort(collectors[0].rid)
        llm.scheduler.retract(collectors[1].scheduler_rid)
        while llm.scheduler.has_work():
            llm.step()
        assert collectors[1].output_ids == answers("qwen3.5")[3]
        check_answers(llm, [0, 1])
        states.check()


def _one_too_few(pool: StatePool, batch: ForwardBatch) -> torch.Tensor:
    """The rollback leaves out a draft that was accepted."""
    return (ACCEPTED(pool, batch) - 1).clamp(min=0)


def _keeps_an_old_count(pool: StatePool, row: int, start: int, end: int) -> Any:
    """A request begins with drafts of the row's last one."""
    seen = pool.num_seen.clone()
    found = BEGIN(pool, row, start, end)
    pool.num_seen.copy_(seen)
    return found


ACCEPTED, BEGIN = StatePool.num_accepted, StatePool.begin


BUGS = Bugs("states of drafts", finder="check_all")
BUGS.add_all(_one_too_few, where=f"{StatePool.__module__}.StatePool.num_accepted")
BUGS.add_all(_keeps_an_old_count, where=f"{StatePool.__module__}.StatePool.begin")


@BUGS.found_by(AssertionError, is_fast=lambda *_: False)
def test_planted_bugs(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant_in(monkeypatch)
    check_all(engine(tmp_path, "reference", max_running_requests=1), [0, 1], [4, 3, 0], [2, 1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_topk": 2, "speculative_num_draft_tokens": 6}, "chains of drafts, and no trees"),
        ({"speculative": "standalone", "use": {"drafter": "reference"}}, "a draft model has KV alone"),
    ],
    ids=str,
)
def test_what_is_refused(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    if flags.get("speculative") == "standalone":
        flags = {**flags, "speculative_draft_model": str(tmp_path)}
    with pytest.raises(ValueError, match=message):
        engine(tmp_path, "reference", **flags)
