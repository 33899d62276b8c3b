"""`diptych bench allreduce`: the time of a sum over ranks, by size and implementation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.bench_run import Progress
from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Plot, run
from diptych.shared.tools.commands.option_values import integers

if TYPE_CHECKING:
    from diptych.shared.tools.bench.all_reduce import SumsPlan, SumsResult


def allreduce(
    ranks: Annotated[int, typer.Option(min=2, help="Processes.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="KB (1,024 bytes) of a rank's tensor; several separated by commas.")
    ] = "8,64,256,512,1024,2048,4096,8192",
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda. Default: cuda if each rank has a GPU.", show_default=False),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            help="GB/s of a rank's links in one direction, for the bound (NVLink of H100 and H200: 450).",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Sums of each size, on a GPU replays of a graph; the table has medians."),
    ] = 30,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """The time of a sum over ranks (all-reduce). On a CPU: the collectives of both panels, over gloo, in
    float32. On GPUs, in a CUDA graph, in bfloat16: the optimized panel's collectives, NCCL, torch's one-shot
    operation, and our Triton kernel."""
    from diptych.shared.tools.bench.all_reduce import KIB, SumsPlan, default_device

    if link is not None and link <= 0:
        raise ValueError(f"--link must be more than 0 GB/s, got {link:g}")
    in_bytes = tuple(size * KIB for size in integers("--sizes", sizes))
    plan = SumsPlan(in_bytes, ranks, device or default_device(ranks), repeats)
    run(AllReduceBenchmark(plan, None if link is None else link * 1e9), output=output, plot=plot)


class AllReduceBenchmark(Benchmark):
    name = "allreduce"

    def __init__(self, plan: SumsPlan, link: float | None) -> None:
        super().__init__()
        self.plan = plan
        self.link = link
        self.title = f"{plan.num_ranks} ranks, {plan.device_type}: us of a sum, bus bandwidth"
        self.facts = asdict(plan) | {
            "link_bytes_per_s": link,
            "dtype": str(plan.dtype).removeprefix("torch."),
        }

    def measure(self, progress: Progress) -> None:
        from diptych.shared.tools.bench.all_reduce import measure

        progress.on_run(f"starting {self.plan.num_ranks} ranks")
        for result in measure(self.plan, self.link):
            progress.on_run(f"{result.num_bytes:,} bytes")
            self.results.append(result)

    def table(self, results: list[SumsResult]) -> Any:
        names = dict.fromkeys(name for result in results for name in result.seconds)
        self.columns = (
            Column("KB", lambda result: f"{result.num_bytes // 1024:,}"),
            *(column for name in names for column in columns_of(name)),
            Column("bound, us", lambda result: us(result.bound)),
        )
        return super().table(results)

    def as_json(self, result: SumsResult) -> dict[str, Any]:
        bandwidths = {name: result.bus_bandwidth(name) for name in result.seconds}
        return asdict(result) | {"bus_bytes_per_s": bandwidths, "bound_s": result.bound}

    def draw(self, file: Path, results: list[SumsResult]) -> None:
        from diptych.shared.tools.bench import plots

        points = [
            (name, result.num_bytes, seconds * 1e6)
            for result in results
            for name, seconds in (result.seconds | ({"bound": result.bound} if result.bound else {})).items()
        ]
        title = f"sum over {self.plan.num_ranks} ranks, {self.plan.device_type}"
        plots.plot_growth(file, title, points, "bytes", "us")


def us(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e6:,.1f}"


def columns_of(name: str) -> tuple[Column, Column]:
    """The time and the bus bandwidth of an implementation."""
    return (
        Column(f"{name}, us", lambda result: us(result.seconds.get(name))),
        Column(
            f"{name}, GB/s", lambda r: f"{r.bus_bandwidth(name) / 1e9:.2f}" if name in r.seconds else None
        ),
    )
