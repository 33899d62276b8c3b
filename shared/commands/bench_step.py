"""`diptych bench step`: the time of one step against the device's limit, and where it goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.commands import bench_run, launch
from shared.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from rich.console import Console

    from shared.bench.kernel_table import KernelTime
    from shared.bench.step import StepResult
    from shared.bench.step_cost import Ceilings
    from shared.bench.step_inputs import StepCase

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
    weight and all live KV read once, every product computed once, at the device's measured speed.

    --model takes several names separated by commas; the shapes of shared/assets/configs (Qwen3-8B ...) get
    random weights.
    """
    cases = make_cases(mode, batch, context, prefill_tokens)
    bench_run.check_files(None, json_file)
    flags = engine.to_flags()
    models = [name.strip() for name in str(flags.pop("model", "tiny-dense")).split(",") if name.strip()]
    if not models:
        raise ValueError("--model names no model")

    from shared.bench import step as bench

    console = bench_run.console()
    ceilings: dict[str, Ceilings] = {}
    results: list[dict[str, Any]] = []
    for model in models:
        found, facts = _measure_one(model, cases, flags, ceilings, repeats, temperature, profile, seed)
        if not results:
            print_ceilings(console, next(iter(ceilings.values())), str(facts["flags"]["device"]))
        print_results(console, found, mode)
        for result in found:
            if result.kernels:
                print_kernels(console, result)
        results += [bench.result_as_json(facts, result) for result in found]
        if json_file is not None:  # after each model: a later one may run out of memory
            report = bench.report(ceilings, results)
            json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if json_file is not None:
        console.print(f"written to {json_file}")


def make_cases(mode: str, batch: str, context: str | None, prefill_tokens: str | None) -> list[StepCase]:
    """All combinations, in the order given."""
    from shared.bench.step_inputs import StepCase

    if mode not in DEFAULTS:
        raise ValueError(f"--mode must be decode, prefill or mixed, got {mode!r}")
    if mode == "decode" and prefill_tokens is not None:
        raise ValueError("--prefill-tokens is no number of a decode step; it has --batch, --context")
    default_context, default_tokens = DEFAULTS[mode]
    batches = parse_numbers("--batch", batch)
    contexts = parse_numbers("--context", context or default_context)
    tokens = parse_numbers("--prefill-tokens", prefill_tokens or default_tokens)
    return [StepCase(mode, b, c, n) for b in batches for c in contexts for n in tokens]  # type: ignore[arg-type]


def parse_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got {text!r}") from None


def _measure_one(
    model: str, cases: list[StepCase], flags: dict[str, Any], ceilings: dict[str, Ceilings], repeats: int,
    temperature: float, profile: bool, seed: int,
) -> tuple[list[StepResult], dict[str, Any]]:  # fmt: skip
    """The model's engine lives no longer than this call: the next one needs the memory."""
    from shared.bench import step as bench
    from shared.bench.ceilings import device_and_dtype, measure_ceilings
    from shared.bench.report import engine_facts
    from shared.config import ModelConfig
    from shared.loading.model_path import resolve_model_path

    config = ModelConfig.from_pretrained(resolve_model_path(model, "dummy"))
    wanted = bench.engine_flags(model, cases, flags, config.context_len)
    device, dtype = device_and_dtype(flags, config)
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype_name not in ceilings:  # before the model takes the memory
        ceilings[dtype_name] = measure_ceilings(device, dtype)
    llm = launch.start_engine(wanted)
    try:
        found = bench.measure(
            llm, model, cases, ceilings[dtype_name], num_repeats=repeats, temperature=temperature,
            profile=profile, seed=seed, on_case=lambda what: print(what, file=sys.stderr),
        )  # fmt: skip
        return found, engine_facts(llm)
    finally:
        del llm
        bench.free_memory(device)


def print_ceilings(console: Console, ceilings: Ceilings, device: str) -> None:
    console.print(
        f"measured here: memory {ceilings.bandwidth / 1e12:.3g} TB/s, GEMM "
        f"{ceilings.matrix_rate / 1e12:.3g} TFLOP/s"
    )
    if not device.startswith("cuda"):
        console.print("no GPU: what fits into this processor's caches can be faster than the floor")


def print_results(console: Console, results: list[StepResult], mode: str) -> None:
    from rich.table import Table

    table = Table(title=results[0].model)
    headings = ["batch", "cached" if mode == "prefill" else "context"]
    headings += ["new tokens"] * (mode != "decode")
    headings += ["step ms", "spread", "host ms", "floor ms", "floor / step", "phases ms"]
    headings += ["tokens/s"] if mode == "decode" else ["TFLOP/s", "of peak"]
    headings.append("launched")
    headings += ["experts"] * (results[0].num_experts_hit is not None)
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in results:
        case = result.case
        spread = (max(result.times) - min(result.times)) / result.time
        cells = [str(case.batch_size), str(case.context_len)]
        cells += [str(case.num_tokens)] * (mode != "decode")
        cells += [
            f"{result.time * 1e3:.3f}",
            f"{spread:.1%}",
            f"{result.host_time * 1e3:.3f}",
            f"{result.floor * 1e3:.3f}",
            f"{result.share_of_floor:.1%}",
            f"{result.cost.roofline(result.ceilings) * 1e3:.3f}",
        ]
        if mode != "decode":
            cells += [
                f"{result.flop_rate / 1e12:.3g}",
                f"{result.flop_rate / result.ceilings.matrix_rate:.1%}",
            ]
        else:
            cells.append(f"{case.batch_size / result.time:,.0f}")
        cells.append("graph" if result.is_replayed else "singly")
        if result.num_experts_hit is not None:
            cells.append(f"{result.num_experts_hit:.1f}" + "?" * (not result.is_routing_counted))
        table.add_row(*cells)
    console.print(table)


def print_kernels(console: Console, result: StepResult) -> None:
    """The longest rows; what is left in one."""
    from rich.table import Table

    case = result.case
    new = f", {case.num_tokens} new tokens" * (case.mode != "decode")
    title = f"{result.model}: {case.mode}, batch {case.batch_size}, context {case.context_len}{new}"
    table = Table(title=title)
    table.add_column("kernel", overflow="fold")
    for heading in ("calls", "a layer", "us", "share"):
        table.add_column(heading, justify="right")
    for row in shortened(result.kernels, NUM_KERNEL_ROWS):
        calls = f"{row.num_calls:g}" if row.num_calls else ""
        a_layer = f"{row.num_calls / result.num_layers:.2g}" if row.num_calls else ""
        total = sum(each.seconds for each in result.kernels)
        table.add_row(row.name, calls, a_layer, f"{row.seconds * 1e6:.1f}", f"{row.seconds / total:.1%}")
    console.print(table)


def shortened(kernels: tuple[KernelTime, ...], num_rows: int) -> list[KernelTime]:
    """At most so many kernels, those behind them as one row; gaps stay."""
    from shared.bench.kernel_table import GAPS, KernelTime

    gaps = [row for row in kernels if row.name == GAPS]
    rows = [row for row in kernels if row.name != GAPS]
    if len(rows) > num_rows:
        rest = rows[num_rows:]
        calls, seconds = (sum(column) for column in list(zip(*rest))[1:])
        rows = [*rows[:num_rows], KernelTime(f"{len(rest)} others", calls, seconds)]
    return rows + gaps
