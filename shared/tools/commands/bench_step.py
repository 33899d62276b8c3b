"""`diptych bench step`: the time of one step against its roofline bound, and its breakdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run, launch
from diptych.shared.tools.commands.benchmark import Benchmark, Column, make_table, ms, run
from diptych.shared.tools.commands.option_values import integers
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from diptych.shared.tools.bench.kernel_table import KernelTime
    from diptych.shared.tools.bench.step import StepResult
    from diptych.shared.tools.bench.step_cost import Ceilings
    from diptych.shared.tools.bench.step_inputs import StepCase

NUM_KERNEL_ROWS = 16
"""Rows of a kernel table that are printed; the rest is one row. The file has them all."""
DEFAULTS = {"decode": ("1024", "0"), "prefill": ("0", "8192"), "mixed": ("1024", "512")}
"""Of --context and --prefill-tokens, by mode."""


@spread
def step(
    *,
    engine: EngineOptions,
    mode: Annotated[str, typer.Option(help="decode, prefill or mixed.")] = "decode",
    batch: Annotated[
        str,
        typer.Option(help="Requests of a step, mixed: of those that decode; several separated by commas."),
    ] = "1,64",
    context: Annotated[
        str | None,
        typer.Option(
            help="decode, mixed: tokens that a request has after the step (default 1024); prefill: tokens "
            "whose KV is there already (default 0). Several separated by commas.",
            show_default=False,
        ),
    ] = None,
    prefill_tokens: Annotated[
        str | None,
        typer.Option(
            help="prefill: new tokens of a step, over all requests (default 8192); mixed: all tokens of "
            "a step, one of each request that decodes, others of a prompt (default 512). Several by commas.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes, by kernel.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each case; the table has their median.")] = 30,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0: greedy.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of token ids, KV, slots and sampling.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything to this file as well.")
    ] = None,
) -> None:
    """The time of one step of the engine's model runner, sampling included, and the least it could be: every
    weight and all live KV read once, every GEMM computed once, at the device's measured speed.

    --model takes several names separated by commas; the shapes of shared/assets/configs (Qwen3-8B ...) get
    random weights.
    """
    cases = make_cases(mode, batch, context, prefill_tokens)
    flags = engine.to_flags()
    models = [name.strip() for name in str(flags.pop("model", "tiny-dense")).split(",") if name.strip()]
    if not models:
        raise ValueError("--model names no model")
    options = {"num_repeats": repeats, "temperature": temperature, "profile": profile, "seed": seed}
    run(StepBenchmark(cases, models, flags, options), output=json_file)


def make_cases(mode: str, batch: str, context: str | None, prefill_tokens: str | None) -> list[StepCase]:
    """The cases: all combinations, in the given order."""
    from diptych.shared.tools.bench.step_inputs import StepCase

    if mode not in DEFAULTS:
        raise ValueError(f"--mode must be decode, prefill or mixed, got {mode!r}")
    if mode == "decode" and prefill_tokens is not None:
        raise ValueError("--prefill-tokens does not apply to a decode step, which has --batch, --context")
    default_context, default_tokens = DEFAULTS[mode]
    batches = integers("--batch", batch)
    contexts = integers("--context", context or default_context)
    tokens = integers("--prefill-tokens", prefill_tokens or default_tokens)
    return [StepCase(mode, b, c, n) for b in batches for c in contexts for n in tokens]  # type: ignore[arg-type]


class StepBenchmark(Benchmark):
    name = "step"

    def __init__(
        self, cases: list[StepCase], models: list[str], flags: dict[str, Any], options: dict[str, Any]
    ) -> None:
        super().__init__(cases)
        self.models = models
        self.flags = flags
        self.options = options
        self.engines: dict[str, dict[str, Any]] = {}  # model -> facts
        self.ceilings: dict[str, Ceilings] = {}  # by dtype

    def measure(self, progress: bench_run.Progress) -> None:
        for model in self.models:
            self.measure_model(model, progress)

    def measure_model(self, model: str, progress: bench_run.Progress) -> None:
        """Measure one model. Its engine is freed at the end of this call, because the next one needs the
        memory."""
        from diptych.shared.config import read_config
        from diptych.shared.loading.model_path import resolve_model_path
        from diptych.shared.tools.bench import step as bench
        from diptych.shared.tools.bench.ceilings import ceilings_before_engine, device_and_dtype
        from diptych.shared.tools.bench.result_header import ceilings_as_json, engine_facts

        config = read_config(resolve_model_path(model, "dummy"))
        flags = bench.engine_flags(model, self.cases, self.flags, config.context_len)
        device, dtype = device_and_dtype(self.flags, config)
        name = str(dtype).removeprefix("torch.")
        if name not in self.ceilings:  # before the model takes the memory
            self.ceilings[name] = ceilings_before_engine(device, dtype)
            self.facts["ceilings"] = {each: ceilings_as_json(found) for each, found in self.ceilings.items()}
        llm = launch.start_llm(flags)
        self.engines[model] = engine_facts(llm)
        try:
            self.results += bench.measure(
                llm, model, self.cases, self.ceilings[name], on_case=progress.on_run, **self.options
            )
        finally:
            del llm
            bench.free_memory(device)

    def table(self, results: list[StepResult]) -> Group:
        """One table for each model, and one for each profile."""
        from rich.console import Group

        ceilings = next(iter(self.ceilings.values()))  # a rank may have a part
        parts: list[str | Table] = [
            f"measured here: memory {ceilings.bandwidth / 1e12:.3g} TB/s, GEMM "
            f"{ceilings.matrix_rate / 1e12:.3g} TFLOP/s"
        ]
        if not str(self.engines[results[0].model]["flags"]["device"]).startswith("cuda"):
            parts.append(
                "no GPU: what fits into this processor's caches can be faster than the roofline bound"
            )
        for model in self.engines:
            found = [result for result in results if result.model == model]
            parts += [make_table(columns(found[0].case.mode), found, model)] if found else []
            parts += [kernel_table(result) for result in found if result.kernels]
        return Group(*parts)

    def as_json(self, result: StepResult) -> dict[str, Any]:
        from diptych.shared.tools.bench.step import result_as_json

        return result_as_json(self.engines[result.model], result)


def columns(mode: str) -> list[Column]:
    """The columns of a model's table."""
    new_tokens = Column("new tokens", lambda result: str(result.case.num_tokens))
    if mode == "decode":
        rates = [Column("tokens/s", lambda result: f"{result.case.batch_size / result.time:,.0f}")]
    else:
        rates = [
            Column("TFLOP/s", lambda result: f"{result.flop_rate / 1e12:.3g}"),
            Column("of peak", lambda result: f"{result.flop_rate / result.ceilings.matrix_rate:.1%}"),
        ]
    return [
        Column("batch", lambda result: str(result.case.batch_size)),
        Column("cached" if mode == "prefill" else "context", lambda result: str(result.case.context_len)),
        *([] if mode == "decode" else [new_tokens]),
        Column("step ms", lambda result: ms(result.time)),
        Column("spread", lambda result: f"{(max(result.times) - min(result.times)) / result.time:.1%}"),
        Column("CPU ms", lambda result: ms(result.host_time)),
        Column("bound ms", lambda result: ms(result.bound)),
        Column("bound / step", lambda result: f"{result.share_of_bound:.1%}"),
        Column("phases ms", lambda result: ms(result.cost.roofline(result.ceilings))),
        *rates,
        Column("launched", lambda result: "graph" if result.is_replayed else "singly"),
        Column("experts", experts_text),
    ]


def experts_text(result: StepResult) -> str | None:
    if result.num_experts_hit is None:
        return None
    return f"{result.num_experts_hit:.1f}" + "?" * (not result.is_routing_counted)


def kernel_table(result: StepResult) -> Table:
    """The table of the longest kernels; the rest is one row."""
    case = result.case
    new = f", {case.num_tokens} new tokens" * (case.mode != "decode")
    title = f"{result.model}: {case.mode}, batch {case.batch_size}, context {case.context_len}{new}"
    total = sum(each.seconds for each in result.kernels)
    kernel_columns = (
        Column("kernel", lambda row: row.name, is_text=True),
        Column("calls", lambda row: f"{row.num_calls:g}" if row.num_calls else None),
        Column("a layer", lambda row: f"{row.num_calls / result.num_layers:.2g}" if row.num_calls else None),
        Column("us", lambda row: f"{row.seconds * 1e6:.1f}"),
        Column("share", lambda row: f"{row.seconds / total:.1%}"),
    )
    return make_table(kernel_columns, shortened(result.kernels, NUM_KERNEL_ROWS), title)


def shortened(kernels: tuple[KernelTime, ...], num_rows: int) -> list[KernelTime]:
    """Keep at most `num_rows` kernels, with the others as one row; idle time stays."""
    from diptych.shared.tools.bench.kernel_table import IDLE, KernelTime

    idle = [row for row in kernels if row.name == IDLE]
    rows = [row for row in kernels if row.name != IDLE]
    if len(rows) > num_rows:
        rest = rows[num_rows:]
        calls, seconds = (sum(column) for column in list(zip(*rest))[1:])
        rows = [*rows[:num_rows], KernelTime(f"{len(rest)} others", calls, seconds)]
    return rows + idle
