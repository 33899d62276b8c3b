"""Which sums are one kernel, and sums that are left to the next norm. The kernel: tests/kernels."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.linear.rms_norm import add_partial_sums_rms_norm
from diptych.optimized.kernels.portable import INTERPRETED
from diptych.optimized.layers import GemmaRMSNorm, RMSNorm, add_and_norm
from diptych.optimized.parallel.collectives import Collectives, NcclCollectives
from diptych.optimized.parallel.symmetric_memory import (
    KIB,
    Place,
    _named_group,
    one_shot_limit,
    share_memory,
    uses_one_shot,
)
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.modeling.stream import RankPart, Stream
from diptych.shared.parallel.alone import ALONE
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req, SamplingParams
from tests.parallel.tiny_ranks import make_config

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")


def test_the_sum_is_chosen_by_bytes_and_ranks() -> None:
    limits = [one_shot_limit(num_ranks) // KIB for num_ranks in range(2, 10)]
    assert limits == [2560, 512, 512, 256, 256, 256, 256, 0]
    assert uses_one_shot(2560 * KIB, 2)
    assert not uses_one_shot(2560 * KIB + 2, 2)
    assert uses_one_shot(256 * KIB, 8)
    assert not uses_one_shot(1, 9)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([Place("a", 0), Place("a", 1)], True),
        ([Place("a", 0), Place("b", 1)], False),  # two computers
        ([Place("a", 0), Place("a", 0)], False),  # each rank sees one GPU alone
        ([Place("a", 0), Place("a", 1), Place("a", 2)], False),  # 0 and 2 do not reach each other
    ],
)
def test_ranks_that_share_memory(
    places: list[Place], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert share_memory(places) == expected


def test_torch_finds_the_group_by_its_name() -> None:
    """With gloo's group in place of NCCL's. Each engine of a process has another name."""
    from torch._C._distributed_c10d import _resolve_process_group

    names = set()
    for _ in range(2):
        store = torch.distributed.HashStore()
        gloo = torch.distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
        group = _named_group(store, 0, 1, gloo)
        assert _resolve_process_group(group.group_name) is group
        assert (group.rank(), group.size()) == (0, 1)
        names.add(group.group_name)
    assert len(names) == 2


class OneShot:
    """In place of the kernel: tells the sums that it gets."""

    dtypes = (torch.float32,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1000

    gather = reduce_scatter = __call__

    def add_rms_norm(self, x: torch.Tensor, *args: Any) -> tuple[str, tuple[Any, ...]]:
        return "fused", args


class OnGpu(Collectives):
    """CPU tensors count as those of a GPU."""

    def _is_small(self, x: torch.Tensor, num_times: float) -> bool:
        class Cuda:
            is_cuda, device = True, x.device
            numel, element_size = x.numel, x.element_size

        self._one_shot = OneShot()
        return super()._is_small(Cuda(), num_times)


def test_small_sums_of_floats_take_the_kernel() -> None:
    def sums(tp: Any) -> list[float]:
        large = torch.ones(2560 * KIB // 4 + 1)
        given = (torch.ones(2), large, torch.ones(2, dtype=torch.int64), torch.ones(2, 3).T)
        return [float(tp.all_reduce(x).flatten()[0]) for x in given]

    assert on_ranks(2, sums, impl=OnGpu) == [[1001.0, 2.0, 2.0, 1001.0]] * 2
    assert on_ranks(2, sums, impl=Collectives) == [[2.0] * 4] * 2
    assert not NcclCollectives.has_one_shot


def test_small_parts_take_the_kernel() -> None:
    """Up to half the bytes of a sum, in one message: NCCL sends half as much for them."""
    most = 1280 * KIB // 4

    def run(tp: Any) -> list[bool]:
        rows = [torch.ones(most, dtype=torch.int32), torch.ones(most + 1, dtype=torch.int32), torch.ones(2)]
        sums = [torch.ones(2 * most), torch.ones(2 * most + 2), torch.ones(2, dtype=torch.int64)]
        found = [tp.all_gather(x) for x in rows] + [tp.reduce_scatter(x) for x in sums]
        return [bool(x.max() > 1000) for x in found]

    assert on_ranks(2, run, impl=OnGpu) == [[True, False, False] * 2] * 2


@interpreted
@pytest.mark.parametrize("norm_class", [RMSNorm, GemmaRMSNorm])
def test_a_builtin_norm_is_part_of_the_kernel(norm_class: type[RMSNorm]) -> None:
    norm = norm_class(16, 1e-5)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 3, 16)

    def fused(tp: Any) -> Any:
        return add_and_norm(norm, Stream(residual, RankPart(x, tp))), tp.log.entries[-1].op

    for (what, args), op in on_ranks(2, fused, impl=OnGpu):
        assert (what, op) == ("fused", "all_reduce_add_and_norm")
        assert (args[0] is residual, args[1] is norm.weight) == (True, True)
        assert args[2:] == (1e-5, norm_class is GemmaRMSNorm)


@interpreted
def test_another_norm_gets_the_sum() -> None:
    class Mine(RMSNorm):
        def add_and_norm(self, x: Any, residual: Any) -> Any:
            return x, residual

    def run(tp: Any) -> list[torch.Tensor]:
        mine, hooked = Mine(16, 1e-5), RMSNorm(16, 1e-5)
        hooked.add_and_norm = lambda x, residual: (x, residual)
        return [add_and_norm(norm, Stream(x, RankPart(x, tp)))[0] for norm in (mine, hooked)]

    x = torch.randn(3, 16)
    for results in on_ranks(2, run, impl=OnGpu):
        for result in results:
            assert torch.equal(result, x + 1000)


@interpreted
def test_without_the_kernel_a_sum_left_to_the_norm_is_the_same() -> None:
    norm = RMSNorm(16, 1e-6)
    norm.weight.data.normal_()
    parts, residual = torch.randn(2, 3, 16), torch.randn(3, 16)
    expected = add_partial_sums_rms_norm(parts, residual.clone(), norm.weight, 1e-6)

    def run(tp: Any) -> Any:
        part = RankPart(parts[tp.rank], tp)
        return part.sum(), add_and_norm(norm, Stream(residual.clone(), part))

    for total, (normed, stream) in on_ranks(2, run, impl=Collectives, in_turn=True):
        assert torch.equal(total, parts.sum(0))
        torch.testing.assert_close((normed, stream), expected)
    x, residual = parts
    alone = ALONE.all_reduce_add_and_norm(x.clone(), residual.clone(), norm)
    torch.testing.assert_close(alone, norm.add_and_norm(x.clone(), residual.clone()))


def ask(config: EngineConfig, tp: Any = None) -> list[int]:
    """One request of a few tokens: Triton's interpreter is slow. Captured hidden states are sums too."""
    assembly = assemble(config, clock=lambda: 0.0, tp=tp)
    assembly.parts.model_runner.capture_hidden = (0, 1)
    req = Req("a", [5, 9, 31], SamplingParams(temperature=0.0, max_new_tokens=3), seed=0)
    assembly.scheduler.add_request(req)
    while assembly.scheduler.has_work():
        assembly.scheduler.step()
    return req.output_ids


@interpreted
@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.full)])
def test_models_that_leave_sums_to_the_norm_answer_as_one(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    use = {"attention": "reference"}
    config = make_config(folders[model]).updated(panel="optimized", disable_cuda_graph=True, use=use)
    alone = ask(config)
    monkeypatch.setattr("diptych.optimized.decoder.sum_later", lambda tp, part: RankPart(part, tp))
    assert (
        on_ranks(2, lambda tp: ask(config.updated(tp=2), tp), impl=Collectives, in_turn=True) == [alone] * 2
    )
