"""The benchmarks of `diptych bench offline`: each case of a workload, on one engine after another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.shared.tools.commands import bench_run, launch
from diptych.shared.tools.commands.benchmark import Benchmark, Column, bound_note, make_table, ms

if TYPE_CHECKING:
    from rich.table import Table

    from diptych.shared.engine.llm import LLM
    from diptych.shared.tools.bench.long_prompts import LongPromptsResult, Window
    from diptych.shared.tools.bench.offline import CaseResult
    from diptych.shared.tools.bench.step_cost import Ceilings
    from diptych.shared.tools.bench.workloads import LongPrompts, Offline256, SharedPrefix, Uniform, Workload


class EnginesBenchmark(Benchmark):
    """One workload on one engine, or two."""

    name = "offline"

    def __init__(
        self, workload: Workload, flags: dict[str, Any], num_repeats: int, num_warm_ups: int
    ) -> None:
        super().__init__()
        self.workload: Any = workload
        self.flags = flags
        self.repeats: dict[str, Any] = {"num_repeats": num_repeats, "num_warm_ups": num_warm_ups}
        self.facts = {"workload": {"name": workload.name} | asdict(workload), **self.repeats}

    def measure(self, progress: bench_run.Progress) -> None:
        for changes in self.engines():
            self.measure_engine(self.flags | changes, progress)

    def engines(self) -> list[dict[str, Any]]:
        """Changes of the flags for each engine."""
        return engines_for(self.workload, self.flags)

    def measure_engine(self, flags: dict[str, Any], progress: bench_run.Progress) -> None:
        """Measure one engine. It is freed at the end of this call, because the next one needs the memory."""
        from diptych.shared.tools.bench.result_header import engine_facts
        from diptych.shared.tools.bench.step import free_memory

        llm = launch.start_llm(flags)
        facts, device = engine_facts(llm), llm.assembly.parts.allocator.device
        try:
            self.measure_cases(llm, facts, progress)
        finally:
            del llm
            free_memory(device)

    def measure_cases(self, llm: LLM, facts: dict[str, Any], progress: bench_run.Progress) -> None:
        raise NotImplementedError

    def plot_title(self, result: CaseResult | LongPromptsResult) -> str:
        flags = result.facts["flags"]
        return f"{self.workload.name}: {flags['model']} on {flags['device']}"


def engines_for(workload: Workload, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes of the flags for each engine. shared-prefix: without the prefix cache, then with it."""
    if workload.name == "shared-prefix" and not flags.get("disable_radix_cache"):
        return [{"disable_radix_cache": True}, {}]
    return [{}]


class OfflineBenchmark(EnginesBenchmark):
    """Measures throughput."""

    workload: Offline256 | SharedPrefix | Uniform
    columns = (
        Column("requests", lambda result: result.label, is_text=True),
        Column("tokens/s (median)", lambda result: f"{result.speed:,.1f}"),
        Column("min", lambda result: f"{min(result.speeds):,.1f}"),
        Column("max", lambda result: f"{max(result.speeds):,.1f}"),
        Column("TTFT, ms", lambda result: ms(result.time_to_first_token, 1)),
        Column("from the cache", lambda result: hit_rate_text(result)),
        Column("idle between steps", lambda result: bench_run.idle_text(result.idle)),
    )

    def __init__(self, *arguments: Any, has_bound: bool, tp_sizes: Sequence[int] = ()) -> None:
        """`tp_sizes`: measure an engine of each of these numbers of ranks; none: one of the flags."""
        super().__init__(*arguments)
        self.tp_sizes = tp_sizes
        self.has_bound = has_bound and self.workload.name != "shared-prefix"
        self.ceilings: Ceilings | None = None

    def measure(self, progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench.result_header import ceilings_as_json

        if self.has_bound:
            self.ceilings = bench_run.ceilings_of(self.flags)
        if self.ceilings is not None:
            self.facts["ceilings"] = ceilings_as_json(self.ceilings)
        super().measure(progress)

    def engines(self) -> list[dict[str, Any]]:
        """Most ranks first: an engine of one leaves memory in use, as kernels and graphs, on rank 0's GPU."""
        return [{"tp": size} for size in sorted(self.tp_sizes, reverse=True)] or super().engines()

    def measure_cases(self, llm: LLM, facts: dict[str, Any], progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench import offline
        from diptych.shared.tools.bench.drive import Sampling
        from diptych.shared.tools.bench.step_cost import of_rank
        from diptych.shared.tools.bench.workload_bound import workload_bound
        from diptych.shared.tools.bench.workloads import SharedPrefix

        workload = self.workload
        for case in workload.cases(llm.model_config.vocab_size):
            result = offline.CaseResult(case, case.name, facts=facts)
            self.results.append(result)
            if self.tp_sizes:
                result.label = f"{case.name}, tp {llm.config.tp}"
            if isinstance(workload, SharedPrefix):
                has_cache = not llm.config.disable_radix_cache
                result.label = f"{case.name}, {'with' if has_cache else 'without'} radix cache"
                ideal = workload.ideal_hit_rate(case.requests, llm.config.page_size)
                result.ideal_hit_rate = ideal if has_cache else 0.0
            if self.ceilings is not None:
                dtype, kv_dtype = llm.assembly.dtype, llm.assembly.kv_pool.dtype
                config, ceilings = of_rank(llm.config, llm.model_config, self.ceilings)
                result.bound = workload_bound(config, case.requests, dtype, ceilings, kv_dtype)
            sampling = Sampling(workload.temperature, workload.seed)
            offline.measure(llm, result, sampling, on_run=progress.on_run, **self.repeats)

    def complete(self) -> list[CaseResult]:
        complete = [result for result in self.results if result.runs]
        return sorted(complete, key=lambda result: result.facts["flags"]["tp"] if self.tp_sizes else 0)

    def notes(self, results: list[CaseResult]) -> Iterator[str]:
        for result in results:
            if result.bound is not None:
                bound = result.bound.tokens_per_second
                yield bound_note(result.label, result.speed / bound, f"{bound:,.0f} tokens/s")
        by_label = {result.label.rpartition(", ")[2]: result.speed for result in results}
        if len(by_label) == 2 and "with radix cache" in by_label:
            gain = by_label["with radix cache"] / by_label["without radix cache"]
            yield f"{gain:.2f} times the throughput with the radix cache"
        for name, speeds in self.speeds_by_tp(results).items():
            first = min(speeds)
            yield from (
                f"{name}: tp {size} has {speed / speeds[first]:.2f} times the throughput of tp {first} "
                f"(ideal {size / first:g})"
                for size, speed in speeds.items()
                if size > first
            )
        num_retractions = sum(run.num_retractions for result in results for run in result.runs)
        if num_retractions:
            yield f"{num_retractions} retractions: the KV pool was short"
        row = self.peers(results[0])
        if row is not None:
            comparison = row.compare_offline(results[0].speed)
            self.facts["peers"] = comparison._asdict()
            yield str(comparison)

    def speeds_by_tp(self, results: list[CaseResult]) -> dict[str, dict[int, float]]:
        """Case -> number of ranks -> tokens/s. Empty without `tp_sizes`."""
        speeds: dict[str, dict[int, float]] = {}
        for result in results if self.tp_sizes else ():
            speeds.setdefault(result.case.name, {})[result.facts["flags"]["tp"]] = result.speed
        return speeds

    def peers(self, result: CaseResult) -> Any:
        """The measurements of other engines, if workload, shape, dtype and GPU are those of the table."""
        from diptych.shared.tools.bench.peers import row_for
        from diptych.shared.tools.bench.workloads import Offline256

        flags = result.facts["flags"]
        if self.workload != Offline256() or not flags["tp"] == flags["dp"] == 1:
            return None
        return row_for(flags["model"], result.facts["dtype"])

    def draw(self, file: Path, results: list[CaseResult]) -> None:
        from diptych.shared.tools.bench import plots
        from diptych.shared.tools.bench.peers import ENGINES

        if self.tp_sizes:
            plots.plot_scaling(file, self.plot_title(results[0]), self.speeds_by_tp(results))
            return
        marks: dict[str, float] = {}
        row = self.peers(results[0])
        if row is not None:
            marks["roofline bound"] = row.offline_bound
            marks |= {engine: speed for engine, speed in zip(ENGINES, row.offline) if speed is not None}
        elif len(results) == 1 and results[0].bound is not None:
            marks["roofline bound"] = results[0].bound.tokens_per_second
        speeds = {result.label: result.speeds for result in results}
        plots.plot_speeds(file, self.plot_title(results[0]), speeds, marks)


def hit_rate_text(result: CaseResult) -> str:
    ideal = result.ideal_hit_rate
    return f"{result.hit_rate:.1%}" + ("" if ideal is None else f" (ideal {ideal:.1%})")


def itl_of(name: str) -> Column:
    def median(row: tuple[str, list[Window]]) -> float:
        return float(statistics.median(getattr(window.itl, name) for window in row[1]))

    return Column(f"ITL {name}, ms", lambda row: ms(median(row), 2))


def ttft_of(row: tuple[str, list[Window]]) -> str | None:
    waits = [wait for window in row[1] for wait in window.times_to_first_token]
    return ms(statistics.median(waits), 1) if waits else None


class LongPromptsBenchmark(EnginesBenchmark):
    """Measures inter-token latency with and without arrivals of long prompts."""

    workload: LongPrompts
    columns = (
        Column("decoding", lambda row: row[0], is_text=True),
        *(itl_of(name) for name in ("p50", "p90", "p99", "max")),
        Column("arrivals", lambda row: str(sum(window.num_arrivals for window in row[1]))),
        Column("their TTFT, ms", ttft_of),
    )

    def measure_cases(self, llm: LLM, facts: dict[str, Any], progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench import long_prompts

        result = long_prompts.LongPromptsResult(facts=facts)
        self.results.append(result)
        long_prompts.measure(llm, self.workload, result, on_run=progress.on_run, **self.repeats)

    def complete(self) -> list[LongPromptsResult]:
        return [result for result in self.results if result.repeats]

    def windows(self, results: list[LongPromptsResult]) -> dict[str, list[Window]]:
        return {
            "without": [repeat.without for repeat in results[0].repeats],
            "with long prompts": [repeat.with_arrivals for repeat in results[0].repeats],
        }

    def table(self, results: list[LongPromptsResult]) -> Table:
        return make_table(self.columns, list(self.windows(results).items()))

    def notes(self, results: list[LongPromptsResult]) -> Iterator[str]:
        yield f"p99 with arrivals is {results[0].p99_ratio:.2f} times that without"
        if results[0].idle is not None:
            yield f"idle between steps: {bench_run.idle_text(results[0].idle)}"

    def draw(self, file: Path, results: list[LongPromptsResult]) -> None:
        from diptych.shared.tools.bench import plots

        itl = {
            title: [interval.seconds for window in windows for interval in window.intervals]
            for title, windows in self.windows(results).items()
        }
        plots.plot_itl(file, self.plot_title(results[0]), itl)
