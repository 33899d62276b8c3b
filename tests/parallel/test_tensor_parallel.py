"""The engine on several ranks: the answers of one rank, whatever the schedule."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from diptych.reference.decoder import DecoderLayer
from diptych.reference.parallel.collectives import Collectives
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.loading.shards import Shards
from diptych.shared.parallel.alone import ALONE
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from tests.parallel.tiny_ranks import answers_of_one, make_config, of_ranks
from tests.planted import Bug, Bugs

TOLERANCE = 1e-4
"""Log-probabilities in float32: a sum over ranks is rounded once more for each rank."""
HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
FLAGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunked_prefill_size": 8, "page_size": 4},
    "mixed chunks": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "small pool": {"max_total_tokens": 80, "schedule_conservativeness": 0.1},
    "overlap": {"use": dict.fromkeys(HOST_PARTS, "optimized")},
    "ngram": {"speculative": "ngram"},
    "sums of the library": {"use": {"collectives": "optimized"}},
    "draft model": {"speculative": "standalone", "speculative_draft_model": "llama"},
    "eagle trees": {"speculative": "eagle", "speculative_draft_model": "eagle-draft", "speculative_topk": 2},
    "eagle ahead": {
        "speculative": "eagle",
        "speculative_draft_model": "eagle-draft",
        "use": dict.fromkeys((*HOST_PARTS, "drafter"), "optimized"),
    },
}


def grid() -> list[Any]:
    """Two ranks; of experts, the flags that change what a rank computes in a step."""
    of_experts = ("mixed chunks", "small pool", "sums of the library")
    fast = {("qwen3-moe" if name in of_experts else "llama", name) for name in FLAGS}
    return [
        pytest.param(
            model, flags, size, marks=[] if size == 2 and (model, flags) in fast else pytest.mark.full
        )
        for model in ("llama", "qwen3-moe")
        for flags in FLAGS
        for size in (2, 4)
    ]


@pytest.mark.parametrize(("model", "flags", "size"), grid())
def test_ranks_answer_as_one(folders: dict[str, str], model: str, flags: str, size: int) -> None:
    given = {name: folders.get(str(value), value) for name, value in FLAGS[flags].items()}
    config = make_config(folders[model], **given)
    alone = answers_of_one(config)
    ranks = of_ranks(config, size)
    for rank in ranks:
        for req, expected, lead in zip(rank, alone, ranks[0]):
            assert req.output_ids == expected.output_ids
            assert req.finished_reason == expected.finished_reason
            assert req.output_logprobs == lead.output_logprobs  # the same bits on all ranks
            pairs = zip(
                req.input_logprobs + req.output_logprobs, expected.input_logprobs + expected.output_logprobs
            )
            for found, wanted in pairs:
                assert found.logprob == pytest.approx(wanted.logprob, abs=TOLERANCE)


def test_more_ranks_than_kv_heads(folders: dict[str, str]) -> None:
    config = make_config(folders["llama"])
    alone = answers_of_one(config)
    for rank in of_ranks(config, 4):
        assert [req.output_ids for req in rank] == [req.output_ids for req in alone]


def test_a_rank_holds_its_part_alone(folders: dict[str, str]) -> None:
    config = make_config(folders["llama"])
    whole = assemble(config)
    parts = on_ranks(2, lambda tp: assemble(config.updated(tp=2), tp=tp))
    num_whole = sum(parameter.numel() for parameter in whole.model.parameters())
    for part in parts:
        assert sum(parameter.numel() for parameter in part.model.parameters()) < 0.6 * num_whole
        assert part.kv_pool.k_buffer(0).shape[1] == 1


@pytest.mark.parametrize("pp", [1, 2])
def test_the_pool_has_the_slots_of_the_rank_with_the_least_memory(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, pp: int
) -> None:
    from diptych.shared.engine.build import pools as module

    plan = module.plan_memory

    def uneven(config: EngineConfig, *args: Any) -> Any:
        import threading

        num_tokens = 1024 if threading.current_thread().name.endswith(f"_{2 * pp - 1}") else 2048
        return plan(config.updated(max_total_tokens=num_tokens), *args)

    monkeypatch.setattr(module, "plan_memory", uneven)
    config = make_config(folders["llama"], tp=2, pp=pp)
    sizes = on_ranks(2 * pp, lambda tp: assemble(config, tp=tp).parts.allocator.size, config=config)
    assert sizes == [1024] * 2 * pp


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"tp": 3}, "num_qo_heads \\(8\\) of LlamaForCausalLM"), ({"tp": 0}, "tp must be an integer >= 1")],
)
def test_what_cannot_run_on_several_ranks(
    folders: dict[str, str], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(make_config(folders["llama"], **flags), tp=ALONE)


def _kv_heads_in_turn(self: Shards, name: str) -> tuple[slice, ...]:
    """KV heads assigned in turn: rank r has head r % 2, not r // 2."""
    if "k_proj" in name or "v_proj" in name:
        return (slice(self.rank % 2 * 8, self.rank % 2 * 8 + 8),)
    return INDEX(self, name)


def _own_first(self: Collectives, parts: list[torch.Tensor]) -> torch.Tensor:
    """Each rank begins the sum with its own part."""
    return SUM(self, [parts[self.rank], *parts[: self.rank], *parts[self.rank + 1 :]])


def _half_of_the_mlp(self: DecoderLayer, *args: Any) -> Any:
    self.mlp.down_proj.weight.data *= 0 if self.tp.rank else 1
    return FORWARD(self, *args)


INDEX, SUM, FORWARD = Shards.index, Collectives._sum, DecoderLayer.forward
PLANTED = Bugs("tensor parallel", finder="answers of one rank")
for _name, (_where, _wrong) in {
    "a bias is added on every rank": ("diptych.shared.loading.shards.REDUCED_BIASES", ("none",)),
    "KV heads are assigned in turn": ("diptych.shared.loading.shards.Shards.index", _kv_heads_in_turn),
    "foreign ids are not zeroed": (
        "diptych.reference.decoder.embed_rows",
        lambda embedding, vocab_size, ids, tp: tp.all_reduce(embedding(ids % embedding.num_embeddings)),
    ),
    "the MLP is not summed": ("diptych.reference.decoder.DecoderLayer.forward", _half_of_the_mlp),
}.items():
    PLANTED.add(_name, _wrong, _name, where=_where)
SUMS = Bugs("order of sums", f"{Collectives.__module__}.Collectives._sum", "bits of other ranks")
SUMS.add_all(_own_first)


@PLANTED.found_by()
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    config = make_config(folders["llama"])
    alone = [req.output_ids for req in answers_of_one(config)]
    bug.plant_in(monkeypatch)
    size = 4 if bug.plant is _kv_heads_in_turn else 2  # more ranks than KV heads
    found = [[req.output_ids for req in rank] for rank in of_ranks(config, size)]
    return found != [alone] * size


@SUMS.found_by(honest=True)
def test_sums_in_another_order_are_other_bits(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Ranks that begin with their own part differ in the last bits: their tokens could."""
    bug.plant_in(monkeypatch)
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    sums = {tuple(x.tolist()) for x in on_ranks(3, lambda tp: tp.all_reduce(parts[tp.rank]))}
    return len(sums) > 1


def test_groups_take_their_memory_before_that_of_weights_and_pools_is_counted(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, events = sys.modules[assemble.__module__], list[str]()
    for name in ("warm_up", "free_gpu_memory", "load_model"):
        function = getattr(module, name)

        def recorded(*args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            events.append(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, recorded)
    config = make_config(folders["llama"])
    assemble(config)
    assert events[:2] == ["free_gpu_memory", "load_model"]
    events.clear()
    assemble(config, tp=ALONE)
    assert events[:3] == ["warm_up", "free_gpu_memory", "load_model"]
