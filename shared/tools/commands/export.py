"""`diptych export`: writes what other projects read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.option_values import LARGEST_SEED

app = typer.Typer(help="Write data sets that other projects read.", no_args_is_help=True)


@app.callback()
def of_kind() -> None:
    """Write data sets that other projects read."""


@app.command()
def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of the data set.", show_default=False)
    ],
    op: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Only this type of operation: rmsnorm. May be repeated."),
    ] = None,
    traces: Annotated[bool, typer.Option(help="Also check and time the Solutions here.")] = True,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Of all inputs.")] = 0,
) -> None:
    """Write a data set of FlashInfer Trace, with NaN in the unused memory of its Workloads."""
    bench_run.check_folder(folder)
    from diptych.shared.tools.conformance.formats import trace_export
    from diptych.shared.tools.conformance.formats.trace_references import DEFINITIONS

    types = dict.fromkeys(each["op_type"] for each in DEFINITIONS.values())
    for each in op or ():
        if each not in types:
            raise ValueError(f"--op {each}: it can be {', '.join(types)}")
    for line in trace_export.export(folder, op or [], seed, traces):
        print(line, flush=True)
