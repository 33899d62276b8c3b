"""Times one step of the engine's model runner, sampling included, against its roofline bound."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from diptych.shared.config import EngineConfig
from diptych.shared.engine.processes.start import on_every_rank
from diptych.shared.engine.requests.lora_adapters import LoraAdapters
from diptych.shared.interfaces import Collectives, ModelRunner, SchedulerParts
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput
from diptych.shared.loading.model_path import is_shape
from diptych.shared.tools.bench.ceilings import call_times, launch_times
from diptych.shared.tools.bench.kernel_table import KernelTime, profile_kernels
from diptych.shared.tools.bench.result_header import spread
from diptych.shared.tools.bench.step_cost import (
    Ceilings,
    StepCost,
    expected_experts_hit,
    is_one_engine,
    of_rank,
    step_cost,
)
from diptych.shared.tools.bench.step_inputs import (
    StepCase,
    assign_adapters,
    check_batch,
    fill_pool,
    make_forward_batch,
    make_sampling_info,
    place_requests,
)

if TYPE_CHECKING:
    from diptych.shared.engine.build.assembly import Assembly
    from diptych.shared.engine.llm import LLM

NUM_WARM_UP = 3
WARM_UP_SECONDS = 0.5
"""Seconds of warm-up steps on a GPU: an idle GPU lowers its clock, which would affect a case."""
SECONDS_PER_CASE = 3.0
"""Seconds after which a case has enough repeats, for any requested number (at least MIN_REPEATS)."""
MIN_REPEATS = 5
MAX_LAUNCHES = 10


@dataclass(frozen=True)
class StepResult:
    """One measured case. Times in seconds."""

    model: str
    case: StepCase
    times: tuple[float, ...]
    host_time: float  # of launching a step on an idle device, median; hidden where it is below the step's
    cost: StepCost
    ceilings: Ceilings
    num_experts_hit: float | None  # distinct experts of a layer, on average; None: no experts
    is_routing_counted: bool  # False: num_experts_hit is the expected value for uniform routing
    num_layers: int
    is_replayed: bool  # from a CUDA graph
    kernels: tuple[KernelTime, ...] = ()

    @property
    def time(self) -> float:
        return statistics.median(self.times)

    @property
    def bound(self) -> float:
        return self.cost.bound(self.ceilings)

    @property
    def share_of_bound(self) -> float:
        """1: as fast as the device allows."""
        return self.bound / self.time

    @property
    def flop_rate(self) -> float:
        return self.cost.flops / self.time


def engine_flags(
    model: str, cases: Sequence[StepCase], flags: dict[str, Any], context_len_of_model: int
) -> dict[str, Any]:
    """The flags of an engine that runs these cases: room for the largest batch, and CUDA graphs for these
    cases only. The user's `flags` take precedence."""
    check_flags(flags)
    longest = max(max(case.seq_lens) for case in cases)
    if longest > context_len_of_model:
        raise ValueError(
            f"{model}: a request of {longest} tokens exceeds its {context_len_of_model} positions"
        )
    wanted: dict[str, Any] = {
        "model": model,
        "max_running_requests": max(case.num_requests for case in cases),
    }
    if is_shape(model):
        wanted["load_format"] = "dummy"
    decodes = sorted({case.batch_size for case in cases if case.mode == "decode"})
    if "cuda_graph_max_bs" not in flags:
        wanted["cuda_graph_bs"] = tuple(decodes) or (1,)
    if all(case.mode == "decode" for case in cases):
        wanted["cuda_graph_max_tokens"] = 0
    mixed = [case.num_tokens for case in cases if case.mode == "mixed"]
    if mixed:  # the largest prefill step as one chunk, without padding
        wanted |= {"enable_mixed_chunk": True, "chunked_prefill_size": max(mixed)}
    return wanted | flags


def check_flags(flags: dict[str, Any]) -> None:
    """Raise `ValueError` for an engine whose step is not one call of a model runner."""
    config = EngineConfig().updated(**flags)
    if not is_one_engine(config):
        raise ValueError(
            f"pp={config.pp}, dp={config.dp}, disaggregation={config.disaggregation}: a step alone is "
            "measured with tp only; `diptych bench offline` and `bench latency` measure the whole engine"
        )


class CaseTimes(NamedTuple):
    """What a rank measures of a case. Times in seconds."""

    steps: list[float]
    hosts: list[float]  # CPU time to launch a step on an idle device
    num_experts_hit: float | None
    is_routing_counted: bool
    is_replayed: bool
    kernels: Sequence[KernelTime]


def measure(
    llm: LLM,
    model: str,
    cases: Sequence[StepCase],
    ceilings: Ceilings,
    *,
    num_repeats: int = 30,
    temperature: float = 0.6,
    profile: bool = False,
    seed: int = 0,
    on_case: Callable[[str], object] = lambda what: None,
) -> list[StepResult]:
    """Measure every case that fits into the KV pool, on an idle engine. The prefix cache is flushed and the
    pool overwritten."""
    if not llm.flush_cache():
        raise ValueError("the engine is busy: a benchmark needs it for itself")
    for case in cases:
        check_batch(case.num_requests, llm.config)
    on_every_rank(llm.assembly, fill_pools, seed)
    config, ceilings = of_rank(llm.config, llm.model_config, ceilings)
    results = []
    num_slots = llm.assembly.parts.allocator.available_size()
    fitting = [case for case in cases if case.num_pool_tokens(llm.config.page_size) <= num_slots]
    for case in cases:
        if fitting and case not in fitting:
            needed = case.num_pool_tokens(llm.config.page_size)
            on_case(f"{model}: left out, {needed} slots and the KV pool has {num_slots}: {case}")
            continue
        on_case(f"{model}: {case.mode}, batch {case.batch_size}, context {case.context_len}")
        found = on_every_rank(llm.assembly, time_case, astuple(case), num_repeats, temperature, profile, seed)
        dtypes, hit = (llm.assembly.dtype, llm.assembly.kv_pool.dtype), found.num_experts_hit
        cost = step_cost(config, case.seq_lens, case.extend_seq_lens, dtypes[0], hit, dtypes[1])
        results.append(
            StepResult(
                model, case, tuple(found.steps), statistics.median(found.hosts), cost, ceilings, hit,
                found.is_routing_counted, config.num_hidden_layers, found.is_replayed, tuple(found.kernels),
            )
        )  # fmt: skip
    return results


def fill_pools(assembly: Assembly, seed: int) -> None:
    """Fill the KV pool of each rank."""
    fill_pool(assembly.kv_pool, seed)


def time_case(
    assembly: Assembly, case: Sequence[Any], num_repeats: int, temperature: float, profile: bool, seed: int
) -> CaseTimes:
    """Measure one case, given by the fields of its `StepCase`. All ranks call it."""
    of_case, parts = StepCase(*case), assembly.parts
    device, runner = parts.allocator.device, parts.model_runner
    with step_of(parts, of_case, temperature, seed, assembly.lora) as step:
        hit, is_counted, config = None, False, assembly.model_config
        if config.moe is not None:
            if assembly.config.ep == 1:  # with more ranks, each has some of the experts
                hit = num_experts_hit(assembly.model, len(config.moe_layers), runner, step)
            is_counted = hit is not None
            if hit is None:
                hit = expected_experts_hit(config, sum(of_case.extend_seq_lens))
        num_before = num_graph_replays(runner)
        times, host_times = time_step(step, device, num_repeats, assembly.tp)
        is_replayed = num_graph_replays(runner) > num_before
        kernels = profile_kernels(step, device) if profile else ()
    return CaseTimes(times, host_times, hit, is_counted, is_replayed, kernels)


@contextmanager
def step_of(
    parts: SchedulerParts, case: StepCase, temperature: float, seed: int, lora: LoraAdapters | None = None
) -> Iterator[Callable[[], object]]:
    """A function that runs the case's step, the same in each call. The KV of its slots is overwritten."""
    rows = place_requests(parts, case, seed)
    if lora is not None:
        assign_adapters(parts, lora, rows)
    batch = make_forward_batch(parts, case, rows, seed)
    info = make_sampling_info(parts, case, temperature, seed)
    try:
        yield lambda: parts.model_runner.forward_and_sample(batch, parts.sampler, info, parts.num_token_ids)
    finally:
        parts.req_to_token_pool.free(rows)


def time_step(
    step: Callable[[], object], device: torch.device, num_repeats: int, tp: Collectives
) -> tuple[list[float], list[float]]:
    """(seconds of each of successive steps, CPU seconds to launch each)."""
    for _ in range(NUM_WARM_UP):
        step()
    once = max(call_times(step, device, 1)[0], 1e-9)
    # All ranks repeat as often as rank 0.
    once = float(tp.broadcast(torch.tensor([once], dtype=torch.float64)))
    if device.type == "cuda":
        call_times(step, device, int(WARM_UP_SECONDS / once) + 1)
    num_repeats = min(num_repeats, max(MIN_REPEATS, int(SECONDS_PER_CASE / once)))
    return call_times(step, device, num_repeats), launch_times(step, device, min(num_repeats, MAX_LAUNCHES))


def num_experts_hit(
    model: nn.Module, num_layers: int, runner: ModelRunner, step: Callable[[], object]
) -> float | None:
    """The mean number of distinct experts that the tokens use in one of `num_layers` layers with experts,
    counted during an eager step. None: the experts are not called as modules."""
    counts: list[int] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, TopKOutput]) -> None:
        ids = args[1].topk_ids
        counts.append(int(torch.unique(ids[ids >= 0]).numel()))

    handles = [
        module.register_forward_pre_hook(look)
        for module in model.modules()
        if isinstance(module, FusedExperts)
    ]
    before = runner.is_watched
    runner.is_watched = True
    try:
        step()
    finally:
        runner.is_watched = before
        for handle in handles:
            handle.remove()
    return statistics.mean(counts) if len(counts) == num_layers else None


def num_graph_replays(runner: ModelRunner) -> int:
    """The replays that a model runner has counted; 0 for a runner without a counter."""
    counts = getattr(runner, "replays", None)
    return 0 if counts is None else int(counts.steps + counts.prompts)


def free_memory(device: torch.device) -> None:
    """Free the memory of a dropped engine, which is in reference cycles and in torch's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def result_as_json(llm_facts: dict[str, Any], result: StepResult) -> dict[str, Any]:
    case = result.case
    return {
        "model": result.model,
        "mode": case.mode,
        "batch_size": case.batch_size,
        "context_len": case.context_len,
        "num_new_tokens": sum(case.extend_seq_lens),
        "step_s": spread(result.times),
        "host_s": result.host_time,
        "weight_bytes": result.cost.weight_bytes,
        "kv_bytes": result.cost.kv_bytes,
        "flops": result.cost.flops,
        "bound_s": result.bound,
        "share_of_bound": result.share_of_bound,
        "roofline_s": result.cost.roofline(result.ceilings),
        "flops_per_s": result.flop_rate,
        "num_experts_hit": result.num_experts_hit,
        "is_routing_counted": result.is_routing_counted,
        "num_layers": result.num_layers,
        "is_replayed": result.is_replayed,
        "kernels": [kernel._asdict() for kernel in result.kernels],
        **llm_facts,
    }
