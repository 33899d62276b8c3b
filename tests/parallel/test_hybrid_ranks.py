"""Several ranks of models with linear attention: each has some key heads, their value heads and states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared.config import EngineConfig, parse_config
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.interfaces import Collectives
from diptych.shared.loading.shards import Shards, shard_config
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req, SamplingParams
from tests.parallel.tiny_ranks import make_config
from tests.planted import Bug, Bugs

_KDA = HYBRID_CONFIGS["kimi-linear"]["linear_attn_config"]
FAMILIES: dict[str, dict[str, Any]] = {
    **HYBRID_CONFIGS,
    "qwen3.5-moe": HYBRID_CONFIGS["qwen3.5-moe"] | {"shared_expert_intermediate_size": 32},
    "kimi-linear": HYBRID_CONFIGS["kimi-linear"] | {"linear_attn_config": _KDA | {"num_heads": 4}},
}
HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
FLAGS: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 8, "page_size": 4, "enable_mixed_chunk": True},
    "small pool": {"max_total_tokens": 64, "schedule_conservativeness": 0.01},
    "drafts": {"speculative": "ngram", "speculative_topk": 1},
    "overlap": {"use": dict.fromkeys(HOST_PARTS, "optimized"), "chunked_prefill_size": 8},
    "nextn": {"speculative": "nextn"},
    "int4": {"quantization": "int4"},
}
TOLERANCE = 1e-4
"""Log-probabilities in float32: a sum over ranks is rounded once more for each rank."""
PROMPTS = [[(7 * j + 3 * (i % 2)) % 331 for j in range(9 + 9 * i)] for i in range(4)]


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "GRID", 8)
    monkeypatch.setattr(state_checkpoints, "ROLLING", 16)


def ask(
    config: EngineConfig, prompts: list[list[int]] = PROMPTS, tp: Collectives | None = None
) -> tuple[list[list[int]], list[float | None], list[int], Assembly]:
    """Twice, the second time with hits: tokens, log-probabilities, and numbers of cached tokens."""
    assembly = assemble(config, clock=lambda: 0.0, tp=tp)
    reqs = []
    for i, prompt in enumerate(prompts * 2):
        params = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True, return_logprob=True)
        reqs.append(Req(f"r{i}", list(prompt), params, seed=0))
        assembly.scheduler.add_request(reqs[-1])
        while assembly.scheduler.has_work() and i + 1 == len(prompts):
            assembly.scheduler.step()
    while assembly.scheduler.has_work():
        assembly.scheduler.step()
    logprobs = [entry.logprob for req in reqs for entry in req.output_logprobs]
    return [req.output_ids for req in reqs], logprobs, [req.num_cached_tokens for req in reqs], assembly


@pytest.mark.parametrize(
    ("family", "flags", "layout"),
    [
        ("qwen3-next", "chunks", {"tp": 2, "ep": 2}),
        ("qwen3.5", "small pool", {"tp": 2}),
        ("qwen3.5", "drafts", {"tp": 2}),
        ("qwen3.5", "nextn", {"tp": 2}),
        ("qwen3.5", "int4", {"tp": 2}),
        ("kimi-linear", "chunks", {"tp": 4}),
        *(
            pytest.param(family, flags, {"tp": 2}, marks=pytest.mark.full)
            for family, flags in (
                *(("qwen3-next", flags) for flags in ("chunks", "small pool", "drafts", "overlap")),
                *(("kimi-linear", flags) for flags in ("small pool", "drafts", "overlap")),
                ("qwen3.5", "overlap"),
            )
        ),
        pytest.param("qwen3.5-moe", "int4", {"tp": 2, "ep": 2}, marks=pytest.mark.full),
    ],
)
def test_ranks_answer_as_one(family: str, flags: str, layout: dict[str, int], tmp_path: Path) -> None:
    """With the same hits on every rank. A rank has its part of each state."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family] | {"mtp_num_hidden_layers": 1}))
    draft = {"speculative_draft_model": str(tmp_path)} if flags == "nextn" else {}
    alone = make_config(str(tmp_path), **draft, **FLAGS[flags])
    ids, logprobs, hits, whole = ask(alone)
    assert flags == "small pool" or sum(hits)
    config = alone.updated(**layout)
    for found in on_ranks(config.num_ranks, lambda tp: ask(config, tp=tp), config=config):
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=TOLERANCE)
        assert found[2] == hits
        assert 2 * states_of(found[3]).numel() <= states_of(whole).numel()
    assert flags != "small pool" or whole.scheduler.stats().num_retractions


def states_of(assembly: Assembly) -> torch.Tensor:
    features: Any = assembly.parts.features
    pool = next(each.pool for each in features if hasattr(each, "pool"))
    recurrent: torch.Tensor = pool.recurrent
    return recurrent


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "kimi-linear"])
@pytest.mark.full  # in the fast cut, one rank answers through the kernels: tests/models/test_hybrid.py
def test_optimized_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    use = {} if family == "kimi-linear" else {"attention": "reference"}
    alone = make_config(str(tmp_path), panel="optimized", disable_cuda_graph=True, use=use)
    expected = ask(alone, PROMPTS[1:2])[::2]
    assert expected[1][1] == 16
    config = alone.updated(tp=2, ep=1 if family == "qwen3.5" else 2)
    for found in on_ranks(2, lambda tp: ask(config, PROMPTS[1:2], tp), in_turn=True):
        assert found[::2] == expected


BUGS = Bugs("cuts of linear attention")
_CUT = "diptych.shared.loading.shards"
BUGS.add("OneBlock", (), "q, k and v are cut as one block.", where=f"{_CUT}.MERGED")
BUGS.words(
    "SameRows",
    "shared.loading.shards:Shards",
    ("shared.loading.shards", "first = start + self.rank % size * num_rows", "first = start + 0 * num_rows"),
    where="diptych.shared.loading.load_model.Shards",
)
BUGS.words(
    "NoSum",
    "reference.models.qwen_next:QwenNextDecoderLayer",
    ("reference.models.qwen_next", "x + self.tp.all_reduce(attend(", "x + (attend("),
    where="diptych.reference.models.qwen_next.QwenNextForCausalLM.layer_class",
)


@BUGS.found_by(honest=True)
def test_a_wrong_cut_is_another_answer(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3.5"]))
    config = make_config(str(tmp_path))
    logprobs = ask(config, PROMPTS[:1])[1]
    bug.plant_in(monkeypatch)
    found = on_ranks(2, lambda tp: ask(config.updated(tp=2), PROMPTS[:1], tp))
    return found[0][1] != pytest.approx(logprobs, abs=TOLERANCE)


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    whole = parse_config(FAMILIES["qwen3.5"])
    assert whole.linear_attention is not None
    rows = torch.arange(whole.linear_attention.num_channels)  # 24 of q, 24 of k, 120 of v
    parts = [Shards(whole, r, 2).cut("model.layers.0.linear_attn.conv1d.weight", rows) for r in range(2)]
    assert parts[0].tolist() == [*range(12), *range(24, 36), *range(48, 108)]
    assert torch.equal(torch.cat(parts).sort().values, rows)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen3.5", 4, r"tp=4: linear_attention.num_k_heads \(2\) of Qwen3_5ForCausalLM"),
        ("kimi-linear", 3, r"num_qo_heads \(4\)"),
    ],
)
def test_heads_that_cannot_be_divided(family: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_config(parse_config(FAMILIES[family]), size)
