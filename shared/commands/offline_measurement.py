"""What `diptych bench offline` measures: each case of a workload, on one engine after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared.commands import bench_run, launch

if TYPE_CHECKING:
    from shared.bench.long_prompts import LongPromptsResult
    from shared.bench.offline import CaseResult
    from shared.bench.step_cost import Ceilings
    from shared.bench.workloads import LongPrompts, Offline256, SharedPrefix, Uniform, Workload
    from shared.engine.llm import LLM


class Measurement:
    """One workload on one engine, or two. Keeps what was complete when it is interrupted."""

    def __init__(self, workload: Workload, num_repeats: int, num_warm_ups: int) -> None:
        self.workload = workload
        self.num_repeats = num_repeats
        self.num_warm_ups = num_warm_ups
        self.ceilings: Ceilings | None = None
        self.progress = bench_run.Progress()
        self.results: list[tuple[CaseResult | LongPromptsResult, dict[str, Any]]] = []  # and the engine

    def run(self, flags: dict[str, Any]) -> None:
        """The engine lives no longer than this call: the next one needs the memory."""
        from shared.bench.report import engine_facts
        from shared.bench.step import free_memory
        from shared.bench.workloads import LongPrompts

        llm = launch.start_engine(flags)
        facts, device = engine_facts(llm), llm.assembly.parts.allocator.device
        try:
            if isinstance(self.workload, LongPrompts):
                self._run_long_prompts(llm, self.workload, facts)
            else:
                self._run_cases(llm, self.workload, facts)
        finally:
            del llm
            free_memory(device)

    def _run_long_prompts(self, llm: LLM, workload: LongPrompts, facts: dict[str, Any]) -> None:
        from shared.bench import long_prompts

        result = long_prompts.LongPromptsResult()
        self.results.append((result, facts))
        long_prompts.measure(
            llm, workload, result, num_repeats=self.num_repeats, num_warm_ups=self.num_warm_ups,
            on_run=self.progress.on_run,
        )  # fmt: skip

    def _run_cases(
        self, llm: LLM, workload: Offline256 | SharedPrefix | Uniform, facts: dict[str, Any]
    ) -> None:
        from shared.bench import offline
        from shared.bench.drive import Sampling
        from shared.bench.limit import workload_limit
        from shared.bench.workloads import SharedPrefix

        for case in workload.cases(llm.model_config.vocab_size):
            result = offline.CaseResult(case, case.name)
            if isinstance(workload, SharedPrefix):
                has_cache = not llm.config.disable_radix_cache
                result.label = f"{case.name}, {'with' if has_cache else 'without'} radix cache"
                ideal = workload.ideal_hit_rate(case.requests, llm.config.page_size)
                result.ideal_hit_rate = ideal if has_cache else 0.0
            if self.ceilings is not None:
                dtype = llm.assembly.kv_pool.dtype
                result.limit = workload_limit(llm.model_config, case.requests, dtype, self.ceilings)
            self.results.append((result, facts))
            sampling = Sampling(workload.temperature, workload.seed)
            offline.measure(
                llm, result, sampling, num_repeats=self.num_repeats, num_warm_ups=self.num_warm_ups,
                on_run=self.progress.on_run,
            )  # fmt: skip
