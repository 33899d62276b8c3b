"""Pipelines whose stages are divided among ranks: the answers of one rank, and groups that stay apart."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.parallel import pipeline as optimized
from diptych.reference.parallel import pipeline as reference
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces.collectives import Collectives, Grid
from diptych.shared.loading import quantize
from diptych.shared.parallel.collective_log import Entry, entries_of, first_difference
from diptych.shared.parallel.grid import groups_of, join_ranks, tp_of
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from tests.parallel.test_families import TOLERANCE, logprobs
from tests.parallel.test_pipeline_parallel import (
    FLAGS,
    PANELS,
    of_stages,
    output_ids,
    retract_some,
    under_way,
)
from tests.parallel.test_quantized_ranks import SIZES
from tests.parallel.tiny_ranks import QWEN3_MOE, answers_of_one, make_config
from tests.planted import Bug, Bugs

FAST = {("llama", "whole"), ("qwen3-moe", "chunks")}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param(model, flags, marks=[] if (model, flags) in FAST else pytest.mark.full)
        for model in ("llama", "qwen3-moe")
        for flags in FLAGS
    ],
)
def test_divided_stages_answer_as_one(folders: dict[str, str], model: str, flags: str, panel: str) -> None:
    """Requests are retracted while their batches are in flight."""
    expected = answers_of_one(make_config(folders[model], **FLAGS[flags]))
    runs = of_stages(make_config(folders[model], tp=2, **FLAGS[flags], **PANELS[panel]), 2, retract_some)
    for run in runs:
        assert output_ids(run.reqs) == output_ids(expected)
        assert [req.output_logprobs for req in run.reqs] == [req.output_logprobs for req in runs[0].reqs]
        assert logprobs(run.reqs) == pytest.approx(logprobs(expected), abs=TOLERANCE)
        assert run.num_under_way == under_way(panel, 2)
        assert run.assembly.kv_pool.num_layers == 1
        assert run.assembly.kv_pool.k_buffer(0).shape[1] == 1  # of two KV heads


def test_groups_of_a_grid(folders: dict[str, str]) -> None:
    """The ranks of a stage are neighbours. Logs of collectives are compared within a group."""
    config = make_config(folders["llama"], tp=3, pp=2)

    def sums(ranks: Collectives) -> tuple[list[int], list[Entry]]:
        x, last = torch.tensor([10**ranks.rank]), groups_of(ranks)[1:]
        found = [int(group.all_reduce(x)) for group in groups_of(ranks)]
        if ranks.rank > 2:
            last[0].broadcast(x)
        return found, entries_of(groups_of(ranks))

    found = on_ranks(6, sums, config=config)
    for rank, (each, _) in enumerate(found):
        assert each == [111111, 111 * 10 ** (rank // 3 * 3), 1001 * 10 ** (rank % 3)]
    logs = [log for _, log in found]
    assert first_difference(logs) is None
    logs[4] = [entry for entry in logs[4] if entry.op != "broadcast"]
    first, *ranks = (first_difference(logs) or "").splitlines()
    assert first == "the ranks differ from collective #2 on:"
    assert [line[:7] for line in ranks] == ["rank 3:", "rank 4:", "rank 5:"]
    assert "broadcast of int64 [1] in tp of stage 1" in ranks[0]
    assert ranks[1] == "rank 4: did not call it"


def test_quantized_inputs_are_scaled_by_all_ranks_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage's layer 0 has experts, the model's has none."""
    mixed = QWEN3_MOE | SIZES | {"num_experts": 4, "moe_intermediate_size": 256, "mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    config = make_config(str(tmp_path), tp=2, pp=2, quantization="fp8")

    def scaled_together(ranks: Collectives) -> set[str]:
        modules, group = assemble(config, tp=ranks).model.named_modules(), tp_of(ranks, config)
        found = {name.rpartition(".")[2] for name, each in modules if group in vars(each).values()}
        return found & {"o_proj", "down_proj", "experts"}

    own = [{"o_proj", "down_proj"}] * 2 + [{"o_proj", "experts"}] * 2
    assert on_ranks(4, scaled_together, config=config) == own
    monkeypatch.setattr(quantize, "_whole_name", lambda name, first_layer: name)
    assert on_ranks(4, scaled_together, config=config)[2:] == [{"o_proj"}] * 2


def _with_groups(choose: Any) -> Any:
    def join(*args: Any) -> Any:
        ranks: Any = join_ranks(*args)
        ranks.grid = choose(ranks, ranks.grid)
        return ranks

    return join


def _of_another_batch(receive: Any) -> Any:
    def late(self: Any, num_tokens: int) -> torch.Tensor:
        """One rank of a stage computes from a peer that is a micro-batch behind."""
        x = receive(self, num_tokens)
        model = self.model if hasattr(self, "model") else self.runner.model
        held = vars(self).setdefault("held", {})
        before = held.get(x.shape, x)
        held[x.shape] = x
        return before if model.tp.rank == 1 else x  # type: ignore[no-any-return]

    return late


PLANTED = Bugs("divided stages", finder="answers of one rank")
for _name, (_where, _wrong) in {
    "sums over all ranks": ("join_ranks", _with_groups(lambda ranks, grid: Grid(ranks, grid.stages))),
    "messages within a stage": ("join_ranks", _with_groups(lambda ranks, grid: Grid(grid.tp, ranks))),
    "another micro-batch": ("reference", _of_another_batch(reference.Stage._receive)),
    "ahead: another micro-batch": ("optimized", _of_another_batch(optimized.Stage._receive)),
}.items():
    _module = on_ranks.__module__ if _where == "join_ranks" else f"diptych.{_where}.parallel.pipeline"
    _attribute = _where if _where == "join_ranks" else "Stage._receive"
    PLANTED.add(_name, _wrong, _name, where=f"{_module}.{_attribute}")


@PLANTED.found_by(honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    expected = output_ids(answers_of_one(make_config(folders["llama"])))
    bug.plant_in(monkeypatch)
    panel = "optimized" if "ahead" in bug.name else "reference"
    config = make_config(folders["llama"], tp=2, **PANELS[panel])
    try:
        found = [output_ids(run.reqs) for run in of_stages(config, 2, seconds=2.0)]
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return True
    return found != [expected] * 4


PROMPTS = ["Count from 3 to 9.", "What is 12 + 30?", "Say 14 in words."]
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 0, "json_schema": {"type": "integer"}},
)


@pytest.mark.parametrize("panel", ["reference", pytest.param("optimized", marks=pytest.mark.full)])
@pytest.mark.parametrize("model", ["tiny-dense", pytest.param("tiny-moe", marks=pytest.mark.full)])
def test_processes_and_a_rank_that_is_killed(model: str, panel: str) -> None:
    """Four processes; the last one is killed while batches are in flight."""
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 2048}
    flags |= {"chunked_prefill_size": 8, "page_size": 4}
    sampled: dict[str, Any] = {"max_tokens": 16, "progress": False}

    def texts(llm: LLM) -> list[str]:
        return [output.text for more in SAMPLING for output in llm.generate(PROMPTS, **sampled, **more)]

    expected = texts(LLM(model, **flags))
    llm = LLM(model, tp=2, pp=2, **flags, **PANELS[panel])
    assert texts(llm) == expected
    follower = llm.scheduler.followers[-1]  # type: ignore[attr-defined]
    threading.Timer(0.3, lambda: os.kill(follower.process.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 3 has ended with signal SIGKILL"):
        llm.generate(PROMPTS * 10, temperature=0, max_tokens=200, ignore_eos=True, progress=False)
    assert time.monotonic() - start < 40
