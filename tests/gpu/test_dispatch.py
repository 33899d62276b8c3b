"""The fast path ran: component calls, graph replays and kernels in a profile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diptych.shared import registry
from diptych.shared.tools.bench.kernel_table import IDLE, profile_kernels
from diptych.shared.tools.bench.step import step_of
from diptych.shared.tools.bench.step_inputs import StepCase, fill_pool
from diptych.shared.tools.conformance.whole_engine.switches import prompts
from diptych.shared.types import SamplingParams
from tests.dispatch_recorder import DispatchRecord

from .harness import MODELS, graph_backends, optimized

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, ignore_eos=True, seed=1)


@pytest.mark.parametrize("backend", graph_backends())
@pytest.mark.parametrize("model", MODELS)
def test_the_optimized_components_did_the_work(model: str, backend: str) -> None:
    llm = optimized(model, backend)
    for component, choices in registry.IMPLEMENTATIONS.items():
        if "optimized" in choices and component != "attention":
            assert llm.describe()[component] == "optimized"
    runner = llm.assembly.parts.model_runner
    with DispatchRecord() as record:
        record.watch_engine(llm)
        llm.generate(prompts(llm), PARAMS, progress=False)
    record.expect_ran("model_runner.forward_and_sample", "diptych.optimized.model_runner.ModelRunner")
    target = registry.IMPLEMENTATIONS["attention"][backend].replace(":", ".")
    record.expect_ran("attention.plan", target)
    record.expect_ran("attention.run", target)
    # One prefill step; every other step replays two graphs: the model and the sampler.
    assert runner.replays.steps == PARAMS.max_new_tokens - 1
    assert runner.replays.samplers == PARAMS.max_new_tokens - 1


@pytest.mark.parametrize("model", MODELS)
def test_a_decode_step_consists_of_our_kernels(model: str) -> None:
    """Layers run no eager PyTorch kernels; only code around the model does."""
    llm = optimized(model, "triton")
    fill_pool(llm.assembly.kv_pool)
    with step_of(llm.assembly.parts, StepCase("decode", 4, 100), 0.8, 0) as step:
        rows = profile_kernels(step, llm.assembly.parts.allocator.device)
    names = {row.name for row in rows if row.name != IDLE}
    assert any("decode" in name for name in names), names
    assert any("qk_norm_rope" in name or "rope_store" in name for name in names), names
    num_layers = llm.model_config.num_hidden_layers
    eager = [row for row in rows if "elementwise" in row.name or "reduce_kernel" in row.name]
    assert [row for row in eager if row.num_calls >= num_layers] == []


def test_kernels_inside_a_graph_are_seen() -> None:
    device = torch.device("cuda")
    x = torch.randn(1024, 1024, device=device)

    def work() -> torch.Tensor:
        return (x @ x).relu_().exp_()

    count_of = {"eager": counts(work, device)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    count_of["replayed"] = counts(graph.replay, device)
    assert sum(count_of["eager"].values()) >= 3
    assert count_of["eager"] == count_of["replayed"]


def counts(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    for _ in range(3):
        step()
    return {row.name: row.num_calls for row in profile_kernels(step, device) if row.num_calls}
