"""Benchmarks of one step with several ranks: all ranks make the same calls."""

from __future__ import annotations

import time

import pytest
import torch

from diptych.shared.config import EngineConfig, ModelConfig, read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import Collectives
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.bench import latency, step
from diptych.shared.tools.bench.round_cost import measure_round
from diptych.shared.tools.bench.step import time_step
from diptych.shared.tools.bench.step_cost import Ceilings, of_rank, step_cost
from diptych.shared.tools.bench.step_inputs import StepCase
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks


def test_a_slower_rank_repeats_as_often() -> None:
    """Rank 0 stops after 3 seconds; rank 1, by its own time, would stop earlier."""

    def run(tp: Collectives) -> tuple[int, int]:
        calls = 0

        def call() -> None:
            nonlocal calls
            calls += 1
            if tp.rank == 1 and calls < 5:
                time.sleep(0.3)

        times, _ = time_step(call, torch.device("cpu"), 20, tp)
        return calls, len(times)

    first, second = on_ranks(2, run)
    assert first == second
    assert first[1] == 20


@pytest.mark.full
def test_steps_and_rounds_of_two_ranks() -> None:
    """Processes, which hang if a rank makes other calls. A case that is refused leaves them in step."""
    eagle = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
    llm = LLM("tiny-dense", tp=2, panel="reference", device="cpu", max_total_tokens=256, **eagle)
    ceilings = Ceilings(2e9, 8e9)
    with pytest.raises(ValueError, match="9 requests of up to 200 tokens need 1800 slots"):
        step.measure(llm, "tiny-dense", [StepCase("decode", 9, 200)], ceilings, num_repeats=1)
    cases = [StepCase("decode", 2, 20), StepCase("prefill", 1, 0, 8)]
    results = step.measure(llm, "tiny-dense", cases, ceilings, num_repeats=1)
    assert [result.case for result in results] == cases
    assert min(result.time for result in results) > 0
    assert results[0].ceilings == Ceilings(1e9, 4e9)  # two ranks share the CPU
    found = measure_round(llm, 2, 20, 1)
    assert list(found.pieces) == ["draft", "verify", "accept", "extend"]
    assert latency.measure_step(llm, latency.Streams(2, 12, 6), 1) > 0
    assert llm.generate([1, 2, 3], max_tokens=2, temperature=0, progress=False).text is not None


def config_of(name: str) -> ModelConfig:
    return read_config(ASSETS / "configs" / name)


def test_a_rank_reads_its_part() -> None:
    """Qwen3-8B: 8 KV heads, MLP 12288, vocabulary 151936. With 16 ranks two have the same KV head."""
    dtype, lens = torch.bfloat16, ([1024] * 4, [1] * 4)
    whole = config_of("Qwen3-8B")
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    cost = step_cost(whole, *lens, dtype)
    for tp, kv_part in ((2, 2), (8, 8), (16, 8)):
        local, ceilings = of_rank(EngineConfig(tp=tp, device="cuda"), whole, Ceilings(4e12, 8e14))
        of_local = step_cost(local, *lens, dtype)
        assert ceilings == Ceilings(4e12, 8e14)
        assert of_local.kv_bytes == cost.kv_bytes / kv_part
        kv_weights = 2 * 36 * 2 * 4096 * 8 * 128
        divided = (cost.weight_bytes - norms - kv_weights) / tp + kv_weights / kv_part
        assert of_local.weight_bytes == divided + norms
    assert of_rank(EngineConfig(device="cpu"), whole, Ceilings(1, 1)) == (whole, Ceilings(1, 1))


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_of_a_rank(ep: int) -> None:
    """The ranks divide the bytes of all experts that are hit, whole experts or parts of each; replicas add
    none."""
    whole = config_of("Qwen3-30B-A3B")
    config = EngineConfig(tp=4, ep=ep, ep_num_redundant_experts=0 if ep == 1 else 8, device="cuda")
    local, _ = of_rank(config, whole, Ceilings(1, 1))
    costs = [step_cost(each, [100] * 8, [1] * 8, torch.bfloat16) for each in (whole, local)]
    sums = [
        [sum(phase[i] for phase in cost.phases if phase.name.startswith("experts.")) for i in (1, 2)]
        for cost in costs
    ]
    assert sums[1] == pytest.approx([number / 4 for number in sums[0]])
