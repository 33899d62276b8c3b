"""`diptych bench startup`: the seconds of a start, with nothing compiled and with everything."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Plot, run
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from diptych.shared.tools.bench.startup import Start


@spread
def startup(
    *,
    engine: EngineOptions,
    cold: Annotated[bool, typer.Option(help="Start with no compiled kernels first.")] = True,
    caches: Annotated[
        Path | None,
        typer.Option(help="Folder of compiled kernels. Default: a temporary one.", show_default=False),
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="Start `diptych serve` too, warm.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Warm starts.")] = 1,
    plot: Plot = None,
    output: Output = None,
) -> None:
    """The seconds of a start by phase, from the process to the first token: with nothing compiled, and with
    everything.

    --model takes several names separated by commas; the shapes of shared/assets/configs (Qwen3-8B ...) get
    random weights.
    """
    models = [name.strip() for name in str(engine.given.get("model", "tiny-dense")).split(",")]
    engines = [EngineOptions(**engine.given | {"model": model}) for model in models]
    with tempfile.TemporaryDirectory() as folder:
        benchmark = StartupBenchmark(engines, caches or Path(folder), cold, server, repeats)
        run(benchmark, output=output, plot=plot)


class StartupBenchmark(Benchmark):
    name = "startup"
    title = "seconds of a start by phase; kernels compiled before and by the first request"

    def __init__(
        self, engines: list[EngineOptions], caches: Path, is_cold: bool, server: bool, repeats: int
    ) -> None:
        from diptych.shared.tools.bench.startup import PHASES

        super().__init__()
        self.engines = engines
        self.caches = caches
        self.kinds = ["cold"] * is_cold + ["warm"] * repeats
        self.server = server
        self.columns = (
            Column("start", lambda start: start.case, is_text=True),
            *(_seconds_of(phase) for phase in (*PHASES, "until ready")),
            Column("total", lambda start: f"{start.total:.1f}"),
            Column("compiled", lambda start: f"{start.num_compiled(False)} + {start.num_compiled_later}"),
        )

    def measure(self, progress: bench_run.Progress) -> None:
        from diptych.shared.tools.bench.startup import start_engine, start_server

        for engine in self.engines:
            model = engine.given["model"]
            caches = self.caches / model.replace("/", "-")
            for kind in self.kinds:
                progress.on_run(f"{model}, {kind}")
                self.results.append(start_engine(f"{model}, {kind}", engine.to_flags(), caches))
            if self.server:
                progress.on_run(f"{model}, server")
                self.results.append(start_server(f"{model}, server", engine.to_arguments(), caches))

    def draw(self, file: Path, results: list[Start]) -> None:
        from diptych.shared.tools.bench.plots import plot_phases

        plot_phases(file, "seconds of a start", {start.case: start.seconds for start in results})


def _seconds_of(phase: str) -> Column:
    def text(start: Start) -> str | None:
        return f"{start.seconds[phase]:.1f}" if phase in start.seconds else None

    return Column(phase, text)
