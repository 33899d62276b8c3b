"""Which GPU each rank and each replica has. No GPU is needed: their number is given."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.config import EngineConfig, read_config
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.build.features.together import check_dp_attention, check_parallel
from diptych.shared.engine.processes import launcher
from diptych.shared.engine.processes.devices import config_in_step, config_of_rank, config_of_replica
from diptych.shared.engine.processes.ranks import assemble_ranks
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.first_use import warm_up
from tests.parallel.tiny_ranks import make_config


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of GPUs."""
    return lambda num: monkeypatch.setattr(torch.cuda, "device_count", lambda: num)


def devices_of_ranks(config: EngineConfig) -> list[str | None]:
    num_ranks = config.num_ranks
    return [config_of_rank(config, rank, num_ranks).device for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cuda", {"tp": 1, "dp": 2}, [["cuda:0"], ["cuda:1"]]),
        ("cuda", {"tp": 2, "dp": 2}, [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]),
        ("cuda:1", {"tp": 3}, [["cuda:1", "cuda:2", "cuda:3"]]),
        ("cuda:2", {"dp": 2}, [["cuda:2"], ["cuda:3"]]),
        ("cpu", {"tp": 2, "dp": 2}, [["cpu", "cpu"], ["cpu", "cpu"]]),
    ],
)
def test_replica_r_of_n_ranks_has_n_gpus(
    gpus: Any, device: str, flags: dict[str, Any], expected: list[list[str]]
) -> None:
    gpus(4)
    config = EngineConfig(device=device, **flags)
    replicas = [config_of_replica(config, replica) for replica in range(config.dp)]
    assert [devices_of_ranks(replica) for replica in replicas] == expected
    assert {replica.dp for replica in replicas} == {1}
    assert {replica.hicache_dir_tokens for replica in replicas} == {config.hicache_dir_tokens // config.dp}


@pytest.mark.parametrize(
    ("device", "flags", "message"),
    [
        ("cuda", {"dp": 2, "tp": 2}, "dp=2 replicas of 2 ranks on device=cuda need 4 GPUs; .* has 3"),
        (
            "cuda:2",
            {"dp": 2},
            "dp=2 replicas of 1 ranks on device=cuda:2 need 2 GPUs from cuda:2 on; .* has 3",
        ),
    ],
)
def test_too_few_gpus_for_replicas(gpus: Any, device: str, flags: dict[str, Any], message: str) -> None:
    gpus(3)
    with pytest.raises(ValueError, match=message):
        config_of_replica(EngineConfig(device=device, **flags), 0)


def test_too_few_gpus_for_ranks(gpus: Any) -> None:
    """Found before a process is started."""
    gpus(1)
    with pytest.raises(
        ValueError, match="tp=2, pp=1: 2 ranks on device=cuda need 2 GPUs; this computer has 1"
    ):
        assemble_ranks(EngineConfig(device="cuda", tp=2))


def test_a_launched_rank_has_the_gpu_of_its_local_rank(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank of the second computer. Without LOCAL_RANK all ranks are on one computer."""
    gpus(2)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launcher._on_own_device(EngineConfig(device="cuda", tp=4)).device == "cuda:1"
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="4 ranks on device=cuda need 4 GPUs; this computer has 2"):
        launcher._on_own_device(EngineConfig(device="cuda", tp=4))


@pytest.mark.parametrize(
    ("device", "flags", "collectives", "message"),
    [
        ("mps", {"tp": 2}, "reference", "tp=2, pp=1 run on device=cpu or cuda; the device is mps"),
        ("cuda:0", {"tp": 2}, "reference", "collectives=reference run over gloo on device=cpu"),
        ("cuda:0", {"pp": 2}, "reference", "pp=2 with collectives=reference runs over gloo on device=cpu"),
        ("cuda:0", {"pp": 2, "panel": "reference"}, "reference", None),
        ("cuda:0", {"pp": 2}, "optimized", None),
        ("cuda:0", {"tp": 2, "ep": 2}, "optimized", None),
        ("cuda:0", {"tp": 2}, "optimized", None),
    ],
)
def test_what_runs_on_gpus(device: str, flags: dict[str, Any], collectives: str, message: str | None) -> None:
    config = EngineConfig(device=device, **{"panel": "optimized", **flags})
    components = dict.fromkeys(("scheduler", "model_runner", "models"), config.panel)
    selection = {**components, "collectives": collectives}
    if message is None:
        check_parallel(config, selection)
    else:
        with pytest.raises(ValueError, match=message):
            check_parallel(config, selection)


@pytest.mark.parametrize(
    ("device", "panel", "collectives", "message"),
    [
        ("cpu", "reference", "reference", None),
        ("cpu", "optimized", "reference", None),
        ("cuda:0", "optimized", "nccl", None),
        ("cuda:0", "optimized", "reference", "panel=optimized, collectives=reference does not run on"),
        ("cuda:0", "reference", "optimized", "panel=reference, .* choose panel=optimized for CUDA"),
        ("mps", "optimized", "optimized", "does not run on device=mps"),
    ],
)
def test_where_replicas_share_experts(
    folders: dict[str, str], device: str, panel: str, collectives: str, message: str | None
) -> None:
    selection = {"scheduler": panel, "model_runner": panel, "collectives": collectives}
    config = EngineConfig(device=device, dp=2, dp_attention=True)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_dp_attention(config, read_config(Path(folders["qwen3-moe"])), selection)


def test_each_replica_in_step_has_a_gpu(gpus: Any) -> None:
    gpus(3)
    config = EngineConfig(device="cuda:1", dp=2, dp_attention=True)
    assert [config_in_step(config, i).device for i in range(2)] == ["cuda:1", "cuda:2"]
    assert config_in_step(config, 1).dp == 2
    with pytest.raises(ValueError, match="dp=3 replicas that share experts on device=cuda:1 need 3 GPUs"):
        config_in_step(config.updated(dp=3), 0)


class Used(Exception):
    """The group was used in time."""


def test_groups_are_used_before_memory_is_measured(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops: list[str] = []

    class Group(type(ALONE)):  # type: ignore[misc]
        size = 2

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            ops.append("all_reduce")
            return x

    def measure(device: torch.device) -> int:
        raise Used(ops)

    monkeypatch.setattr("diptych.shared.engine.build.assembly.free_gpu_memory", measure)
    with pytest.raises(Used, match="all_reduce"):
        assemble(make_config(folders["llama"], tp=2), tp=Group())


def test_a_group_of_one_rank_is_not_used() -> None:
    warm_up(ALONE, torch.device("cuda"))
    assert list(ALONE.log.entries) == []
