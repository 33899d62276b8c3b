"""Two GPUs: the one-shot sum, NCCL, graphs that contain both, engines of two ranks, and pairs of engines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from diptych.shared.engine.llm import LLM
from tests.gpu.gpu_ranks import NUM_REPLAYS, norms, on_gpus, parts_that_differ, replays, sums_that_differ
from tests.parallel.split_ranks import SECRET, servers_of

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]
FLAGS: dict[str, Any] = {
    "device": "cuda",
    "panel": "optimized",
    "dtype": "float32",
    "max_total_tokens": 8192,
    "max_running_requests": 4,
    "cuda_graph_max_tokens": 64,
    "skip_warmup": True,
}
"""Few sizes of graphs: each has kernels of its own to compile. Others are compiled when a step needs them."""
PROMPTS = ("Count from 3 to 9.", "What is 12 + 30?", "What is 7 + 5?")
MORE_PROMPTS = (*PROMPTS, "What is 3 + 4 + 5?", "Count from 10 to 4.")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "progress": False}


@cache
def of_one_rank(
    model: str = "tiny-dense", panel: str = "optimized", prompts: Sequence[str] = PROMPTS
) -> list[str]:
    """The greedy text."""
    llm = LLM(model, **FLAGS | {"panel": panel})
    return [output.text for output in llm.generate(list(prompts), **GREEDY)]


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of a norm, whose sum of squares has another order in another kernel: one unit in the last place."""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
def test_the_kernel_sums_in_the_order_of_ranks(size: int) -> None:
    """Bit for bit as the ordered float32 sum, and for two ranks as NCCL."""
    assert on_gpus(size, sums_that_differ) == [[]] * size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
def test_the_kernel_gathers_and_adds_parts(size: int) -> None:
    assert on_gpus(size, parts_that_differ) == [[]] * size


def test_the_kernel_adds_the_residual_and_norms() -> None:
    for first, second in zip(*on_gpus(2, norms)):
        normed, total, expected_normed, expected_total = first
        assert torch.equal(total, expected_total)
        torch.testing.assert_close(normed, expected_normed, rtol=TOLERANCE[total.dtype], atol=1e-5)
        assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_graphs_with_sums_give_both_ranks_the_same_bits() -> None:
    (state, checksum), (other_state, other_checksum) = on_gpus(2, replays)
    assert torch.isfinite(state.float()).all()
    assert torch.equal(state, other_state)
    assert checksum == other_checksum


DRAFTS: dict[str, Any] = {
    "speculative": "eagle3",
    "speculative_draft_model": "tiny-dense-eagle3",
    "use": {"attention": "triton"},
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs": ("tiny-dense", {}),
    "compiled ahead": ("tiny-dense", {"skip_warmup": False}),
    "no graphs": ("tiny-dense", {"disable_cuda_graph": True}),
    "NCCL": ("tiny-dense", {"use": {"collectives": "nccl"}}),
    "two halves": (
        "tiny-dense",
        {"two_batch_tokens": 16, "enable_mixed_chunk": True, "use": {"collectives": "nccl"}},
    ),
    "two halves, whole experts": ("tiny-moe", {"ep": 2, "two_batch_tokens": 16}),
    "parts of experts": ("tiny-moe", {}),
    "whole experts": ("tiny-moe", {"ep": 2}),
    "experts that move": (
        "tiny-moe",
        {"ep": 2, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 10},
    ),
    "all-to-all": (
        "tiny-moe",
        {"ep": 2, "use": {"expert_dispatch": "all_to_all"}, "disable_cuda_graph": True},
    ),
    # Graphs of drafts sum the rows of the embedding over the ranks.
    "drafts": ("tiny-dense", DRAFTS),
    "drafts, NCCL": ("tiny-dense", {**DRAFTS, "use": {"attention": "triton", "collectives": "nccl"}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_answer_as_one(way: str) -> None:
    """Greedy text in float32."""
    model, more = WAYS[way]
    llm = LLM(model, tp=2, **(FLAGS | more))
    assert [output.text for output in llm.generate(list(PROMPTS), **GREEDY)] == of_one_rank(model)
    if "disable_cuda_graph" not in more:
        assert llm.assembly.parts.model_runner.replays.steps > 0
    if "two_batch_tokens" in more:
        assert llm.assembly.parts.model_runner.run_model.num_passes > 0
    if "speculative" in more:
        assert llm.assembly.parts.drafter.drafter.graphs[0].num_replays > 0


IN_STEP: dict[str, dict[str, Any]] = {
    "parts of experts": {},
    "whole experts": {"ep": 2},
    "no graphs": {"ep": 2, "disable_cuda_graph": True},
    "two halves": {"ep": 2, "two_batch_tokens": 16},
    "NCCL": {"use": {"collectives": "nccl"}},
    "not overlapped": {"ep": 2, "disable_overlap_schedule": True},
    "mixed chunks": {"ep": 2, "chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "small pool": {"ep": 2, "max_total_tokens": 128, "schedule_conservativeness": 0.1},
    "experts that move": {"ep": 2, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 10},
    "n-gram drafts": {"ep": 2, "speculative": "ngram", "speculative_topk": 1},
    "n-gram drafts, NCCL": {"speculative": "ngram", "speculative_topk": 1, "use": {"collectives": "nccl"}},
    "draft model": {"ep": 2, "speculative": "standalone", "speculative_draft_model": "tiny-dense"},
}


@pytest.mark.parametrize("way", IN_STEP)
def test_replicas_that_share_experts_answer_as_one(way: str) -> None:
    """Greedy text in float32. Both replicas, one with the other idle, and both again with cached prompts."""
    _replicas_answer_as_one(way)


@pytest.mark.gpus(4)
@pytest.mark.parametrize("way", IN_STEP)
def test_divided_replicas_that_share_experts_answer_as_one(way: str) -> None:
    """The same with two ranks in each replica."""
    _replicas_answer_as_one(way, tp=2)


def _replicas_answer_as_one(way: str, tp: int = 1) -> None:
    more = IN_STEP[way]
    expected = of_one_rank("tiny-moe", prompts=MORE_PROMPTS)
    llm = LLM("tiny-moe", dp=2, tp=tp, dp_attention=True, **(FLAGS | more))
    for asked in (MORE_PROMPTS, MORE_PROMPTS[:1], MORE_PROMPTS):
        assert [output.text for output in llm.generate(list(asked), **GREEDY)] == expected[: len(asked)]
    runner: Any = llm.assembly.parts.model_runner
    assert (runner.replays.steps > 0) == ("disable_cuda_graph" not in more)
    assert runner.replays.steps < runner.num_passes
    if "speculative" in more:
        assert all(steps.num_replays > 0 for steps in runner.steps.verify)
        assert llm.scheduler.stats().speculation.num_accepted_tokens > 0
    if way == "small pool":
        assert llm.scheduler.stats().num_retractions > 0


@pytest.mark.gpus(4)
def test_four_replicas_that_share_experts_answer_as_one() -> None:
    llm = LLM("tiny-moe", dp=4, ep=2, dp_attention=True, **FLAGS)
    assert [output.text for output in llm.generate(list(PROMPTS), **GREEDY)] == of_one_rank("tiny-moe")


@pytest.mark.gpus(4)
@pytest.mark.parametrize(("model", "ep"), [("tiny-dense", 1), ("tiny-moe", 1), ("tiny-moe", 4)])
def test_four_ranks_answer_as_one(model: str, ep: int) -> None:
    llm = LLM(model, tp=4, ep=ep, **FLAGS)
    assert [output.text for output in llm.generate(list(PROMPTS), **GREEDY)] == of_one_rank(model)


@pytest.mark.gpus(4)
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize("way", ["graphs", "no graphs", "NCCL", "mixed chunks"])
def test_divided_stages_answer_as_one(model: str, way: str) -> None:
    """Two stages of two ranks, twice: the second time the prompts are cached."""
    more: dict[str, Any] = {"chunked_prefill_size": 16, "enable_mixed_chunk": True}
    more = WAYS[way][1] if way in WAYS else more
    llm = LLM(model, tp=2, pp=2, **FLAGS | more)
    for _ in range(2):
        assert [output.text for output in llm.generate(list(PROMPTS), **GREEDY)] == of_one_rank(model)
    runner: Any = llm.assembly.parts.model_runner
    assert (runner.replays.steps > 0) == ("disable_cuda_graph" not in more)
    tp = runner.model.tp
    assert (tp.size, tp._one_shot is not None) == (2, way != "NCCL")


STANDALONE: dict[str, Any] = {"speculative": "standalone", "speculative_draft_model": "tiny-dense"}


@pytest.mark.parametrize(
    ("panel", "more"),
    [
        ("reference", {"pp": 2}),
        ("optimized", {"pp": 2}),
        ("optimized", {"pp": 2, "disable_cuda_graph": True}),
        ("optimized", {"pp": 2, "chunked_prefill_size": 16, "enable_mixed_chunk": True}),
        ("reference", {"disaggregation": True}),
        ("optimized", {"disaggregation": True}),
        ("optimized", {"disaggregation": True, "use": {"transport": "shared_memory"}}),
        ("optimized", {"disaggregation": True, "speculative": "ngram", "speculative_topk": 1}),
        ("optimized", {"disaggregation": True, **STANDALONE}),
        ("optimized", {"disaggregation": True, **DRAFTS}),
        ("optimized", {"disaggregation": True, **DRAFTS, "use": {"transport": "shared_memory"}}),
        ("reference", {"disaggregation": True, **DRAFTS}),
        ("reference", {"disaggregation": True, **STANDALONE}),
    ],
)
def test_two_engines_answer_as_one(panel: str, more: dict[str, Any]) -> None:
    """Twice: the second time the prompts are cached."""
    llm = LLM("tiny-dense", **(FLAGS | {"panel": panel} | more))
    for _ in range(2):
        assert [output.text for output in llm.generate(list(PROMPTS), **GREEDY)] == of_one_rank(panel=panel)
    if panel == "optimized" and more.get("pp") and "disable_cuda_graph" not in more:
        assert llm.assembly.parts.model_runner.replays.steps > 0


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["no drafts", "EAGLE-3"])
def test_split_servers_answer_as_one(
    ranks: tuple[int, int], drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill server and a decode server, whose GPUs are the same: their pools are small."""
    monkeypatch.setenv("DIPTYCH_CLUSTER_SECRET", SECRET.decode())
    flags = ["--device", "cuda", "--panel", "optimized", "--dtype", "float32", "--skip-warmup"]
    flags += ["--max-total-tokens", "8192", "--max-running-requests", "4", "--cuda-graph-max-tokens", "64"]
    for name in [each for each in drafts if each != "use"]:
        flags += ["--" + name.replace("_", "-"), drafts[name]]
    flags += ["--use", "attention=triton"] if drafts else []
    body = {"prompt": list(PROMPTS), "temperature": 0, "max_tokens": 48, "ignore_eos": True}
    with servers_of(ranks, *flags) as (_, decode):
        for _ in range(2):  # the second time the prompts are cached
            answer = httpx.post(f"{decode.url}/v1/completions", json=body, timeout=300).json()
            assert [choice["text"] for choice in answer["choices"]] == of_one_rank()


COUNTS = """
import torch
from diptych.optimized.parallel.collectives import Collectives

class Counts(Collectives):
    num_different = None

    def broadcast(self, x, source=0):
        received = super().broadcast(x, source)
        if x.is_cuda and x.dtype == torch.int64:
            if self.num_different is None:
                self.num_different = torch.zeros((), dtype=torch.int64, device=x.device)
            self.num_different += self.all_reduce((received != x).sum())
        return received
"""


def test_both_ranks_sample_the_same_tokens(tmp_path: Path) -> None:
    """Over 10^4 replays, before the tokens of rank 0 are taken: rank 0 learns what the other one sampled."""
    (tmp_path / "counts.py").write_text(COUNTS)
    use = {"collectives": f"{tmp_path / 'counts.py'}:Counts"}
    llm = LLM("tiny-dense", tp=2, use=use, **FLAGS | {"dtype": "bfloat16"})
    sampling = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": True, "progress": False}
    runner: Any = llm.assembly.parts.model_runner
    scheduler: Any = llm.scheduler
    while runner.replays.steps < NUM_REPLAYS:
        llm.generate(list(PROMPTS * 8), **sampling)
    assert runner.replays.samplers > 0.9 * NUM_REPLAYS
    assert int(scheduler.tp.num_different) == 0


@pytest.mark.parametrize("way", ["tp", "pp", pytest.param("tp pp", marks=pytest.mark.gpus(4))])
def test_a_rank_that_is_killed_ends_the_engine(way: str) -> None:
    llm = LLM("tiny-dense", **FLAGS, **dict.fromkeys(way.split(), 2))
    *_, follower = llm.scheduler.followers  # type: ignore[attr-defined]
    os.kill(follower.process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{follower.name} has ended with signal SIGKILL"):
        llm.generate(list(PROMPTS), **GREEDY)
    assert time.monotonic() - start < 10


def test_a_replica_that_is_killed_ends_all_that_share_its_experts() -> None:
    llm = LLM("tiny-moe", dp=2, dp_attention=True, **FLAGS)
    os.kill(llm.scheduler.replicas[1].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="replica 1 has ended with signal SIGKILL"):
        llm.generate(list(PROMPTS), **GREEDY)
    assert time.monotonic() - start < 10
