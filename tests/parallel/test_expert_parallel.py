"""The engine with expert parallelism: the answers of one rank, while experts move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.expert_map import ExpertPlacement
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req, SamplingParams
from tests.parallel.test_tensor_parallel import FLAGS
from tests.parallel.tiny_ranks import answers, answers_of_one, make_config
from tests.planted import Bug, Bugs

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
OTHERS = [n for n in FLAGS if n != "mixed chunks" and "speculative_draft_model" not in FLAGS[n]]
EP: dict[str, dict[str, Any]] = {
    "all-gather": {"ep": 2},
    "all-to-all": {"ep": 2, "use": {"expert_dispatch": "all_to_all"}},
    "rebalanced": {"ep": 2, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 3},
    "rebalanced, all-to-all": {
        "ep": 2,
        "ep_num_redundant_experts": 4,
        "eplb_rebalance_num_iterations": 1,
        "use": {"expert_dispatch": "all_to_all"},
    },
}


def of_ranks(config: EngineConfig, size: int, **flags: Any) -> list[tuple[Assembly, list[Req]]]:
    def run(tp: Collectives) -> tuple[Assembly, list[Req]]:
        assembly = assemble(config.updated(tp=size, **flags), clock=lambda: 0.0, tp=tp)
        return assembly, answers(assembly)

    return on_ranks(size, run)


def output_ids(reqs: list[Req]) -> list[list[int]]:
    return [req.output_ids for req in reqs]


def grid() -> list[Any]:
    """The fast cut has each kind once."""
    fast = {("all-gather", 2), ("all-to-all", 2), ("rebalanced", 4), ("rebalanced, all-to-all", 2)}
    return [
        pytest.param(kind, size, flags, marks=[] if not i and (kind, size) in fast else pytest.mark.full)
        for i, flags in enumerate(["mixed chunks", *OTHERS])
        for size in (2, 4)
        for kind in EP
    ]


@pytest.mark.parametrize(("kind", "size", "flags"), grid())
def test_ranks_answer_as_one(folders: dict[str, str], kind: str, size: int, flags: str) -> None:
    config = make_config(folders["qwen3-moe"], **FLAGS[flags])
    expected = output_ids(answers_of_one(config))
    use = {**config.use, **EP[kind].get("use", {})}
    for assembly, reqs in of_ranks(config, size, **{**EP[kind], "use": use}):
        assert output_ids(reqs) == expected
        assert assembly.experts is not None
        if "rebalanced" in kind:
            assert assembly.experts.num_moved > 0


@pytest.mark.parametrize("method", ["int4", "fp8"])
def test_quantized_experts_move_with_their_scales(folders: dict[str, str], method: str) -> None:
    config = make_config(folders["qwen3-moe"], quantization=method)
    expected = output_ids(answers_of_one(config))
    for assembly, reqs in of_ranks(config, 2, **EP["rebalanced"]):
        assert output_ids(reqs) == expected
        assert assembly.experts is not None
        assert assembly.experts.num_moved > 0


def test_a_rank_holds_its_experts_alone(folders: dict[str, str]) -> None:
    config = make_config(folders["qwen3-moe"])
    whole = assemble(config).model
    for size, ep, shape in ((2, 2, (3, 32, 32)), (4, 2, (3, 16, 32)), (2, 1, (6, 16, 32))):
        local = config.updated(tp=size, ep=ep)
        parts = on_ranks(size, lambda tp, local=local: assemble(local, tp=tp).model)  # type: ignore[misc]
        for part in parts:
            assert part.model.layers[0].mlp.experts.w13.shape == shape
            assert torch.equal(part.model.layers[0].mlp.gate.weight, whole.model.layers[0].mlp.gate.weight)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ep": 2}, "ep=2 needs tp to be a multiple of it, and tp is 1"),
        ({"tp": 4, "ep": 3}, "ep=3 needs tp"),
        ({"tp": 2, "ep_num_redundant_experts": 2}, "ep_num_redundant_experts=2 needs ep > 1"),
        ({"eplb_rebalance_num_iterations": 5}, "eplb_rebalance_num_iterations=5 needs ep > 1"),
        ({"tp": 2, "ep": 2, "ep_num_redundant_experts": -1}, "ep_num_redundant_experts must be"),
        ({"tp": 2, "ep": 2, "ep_num_redundant_experts": 1}, "must be a multiple of ep"),
        ({"tp": 2, "ep": 2, "ep_num_redundant_experts": 8}, "at most 12"),
        ({"model": "tiny-dense", "tp": 2, "ep": 2}, "ep=2: .* has no experts"),
    ],
)
def test_what_cannot_run(folders: dict[str, str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(make_config(**{"model": folders["qwen3-moe"]} | flags), tp=ALONE)


def test_processes() -> None:
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "progress": False}
    prompts = ["Count from 3 to 9.", "What is 12 + 30?"]
    expected = [output.text for output in LLM("tiny-moe", **flags).generate(prompts, **sampling)]
    llm = LLM("tiny-moe", tp=2, ep=2, ep_num_redundant_experts=2, eplb_rebalance_num_iterations=4, **flags)
    assert [output.text for output in llm.generate(prompts, **sampling)] == expected


def _never_used(self: ExpertPlacement, experts: Any) -> None:
    if not hasattr(self, "num_replicas"):
        USE(self, experts)


def _late(self: ExpertManager, *args: Any) -> Any:
    """New experts overwrite the old ones before these are sent."""
    experts, old, new = args
    own = self.ranks.rank * self.ep // self.ranks.size
    for weight in (experts.w13.data, experts.w2.data):
        kept = [old[own].index(e) if e in old[own] else 0 for e in new[own]]
        weight.copy_(weight[kept])
    return MOVE(self, *args)


USE, MOVE = ExpertPlacement.use, ExpertManager._move_layer
PLANTED = Bugs("expert parallel", finder="answers of one rank")
for _name, (_where, _wrong) in {
    "a stale map after a rebalance": ("diptych.shared.parallel.expert_map.ExpertPlacement.use", _never_used),
    "experts are overwritten, then sent": (
        "diptych.shared.parallel.expert_manager.ExpertManager._move_layer",
        _late,
    ),
    "outputs are added on every rank": (
        "diptych.shared.interfaces.ExpertDispatch.run_replicated",
        lambda self, x, topk, experts, placement: self.run(
            x, topk._replace(topk_ids=placement.choose(topk.topk_ids)), experts
        ),
    ),
}.items():
    PLANTED.add(_name, _wrong, _name, where=_where)


@PLANTED.found_by()
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    config = make_config(folders["qwen3-moe"])
    expected = output_ids(answers_of_one(config))
    bug.plant_in(monkeypatch)
    found = of_ranks(config, 2, **EP["rebalanced"])
    return [output_ids(reqs) for _, reqs in found] != [expected] * 2


OPTIMIZED: dict[str, dict[str, Any]] = {
    "all-gather": {},
    "all-to-all": {"use": {"expert_dispatch": "all_to_all"}},
    "rebalanced": {"ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 2},
    "fp8": {"quantization": "fp8"},
}


def addresses(experts: ExpertManager) -> list[int]:
    """Addresses of the tensors that a CUDA graph reads."""
    tensors = [x for moe in experts.layers for x in moe.experts.parameters()]
    tensors += [x for each in experts.placements for x in vars(each).values() if isinstance(x, torch.Tensor)]
    return [x.data_ptr() for x in tensors]


def ask(config: EngineConfig, tp: Collectives | None = None) -> list[int]:
    """The answer to a request of a few tokens: Triton's interpreter is slow."""
    assembly = assemble(config, clock=lambda: 0.0, tp=tp)
    before = addresses(assembly.experts) if assembly.experts is not None else []
    req = Req("a", [5, 9, 31, 7], SamplingParams(temperature=0.0, max_new_tokens=5), seed=0)
    assembly.scheduler.add_request(req)
    while assembly.scheduler.has_work():
        assembly.scheduler.step()
    if assembly.experts is not None:
        assert addresses(assembly.experts) == before
        assert (assembly.experts.num_moved > 0) == (config.eplb_rebalance_num_iterations is not None)
    return req.output_ids


@interpreted
@pytest.mark.parametrize(
    ("size", "kind"),
    [
        pytest.param(size, kind, marks=[] if (size, kind) == (2, "rebalanced") else pytest.mark.full)
        for size in (2, 4)
        for kind in OPTIMIZED
        if (size, kind) != (4, "fp8")  # a part of several ranks has no scales of tokens
    ],
)
def test_optimized_ranks_answer_as_one(folders: dict[str, str], kind: str, size: int) -> None:
    """Through Triton's interpreter, a rank at a time."""
    flags = dict(OPTIMIZED[kind])
    use = {"attention": "reference", **flags.pop("use", {})}
    config = make_config(folders["qwen3-moe"], panel="optimized", disable_cuda_graph=True, use=use)
    expected = ask(config.updated(quantization=flags.get("quantization")))
    config = config.updated(tp=size, ep=2, **flags)
    assert on_ranks(size, lambda tp: ask(config, tp), in_turn=True) == [expected] * size
