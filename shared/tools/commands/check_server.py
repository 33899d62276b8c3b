"""`diptych check server`: compares a server with OpenAI's API with the reference in float32."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.announced import Announced, drawn
from diptych.shared.tools.commands.report_options import BadgeFile, JsonFile, JunitFile, SarifFile, SecretSeed

SECONDS = {"": 3600.0, "quick": 900.0, "thorough": 21600.0}
"""That a check takes at most."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diptych.shared.tools.conformance.server.checks import Check


def check_server(
    url: Annotated[
        str | None, typer.Argument(help="Of the server: http://127.0.0.1:8080.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="What it serves: folder in Hugging Face format, built-in model or id.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server.", envvar="DIPTYCH_API_KEY")] = None,
    served_model: Annotated[
        str, typer.Option(help="The model's name in requests. Default: the first that the server lists.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format of the server, which gives the tolerance: auto, float32, float16, bfloat16, "
            "fp8, int8, int4, q8_0 or q4. auto: the checkpoint's own, float32, float16 or else bfloat16."
        ),
    ] = "auto",
    seeded: Annotated[
        str,
        typer.Option(
            metavar="NOISE",
            help="Whose noise the server's samples have: diptych, or greedy for an unknown one, where greedy "
            "tokens alone are verified. auto: by the server's name.",
        ),
    ] = "auto",
    tool_call_parser: Annotated[
        str, typer.Option(metavar="NAME", help="How the model writes calls. auto: by its chat template.")
    ] = "auto",
    only: Annotated[
        list[str] | None, typer.Option(metavar="GROUP|NAME", help="Only this. May be repeated.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="GROUP|NAME", help="Without this. May be repeated.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report to read.")] = None,
    json_file: JsonFile = None,
    junit: JunitFile = None,
    sarif: SarifFile = None,
    badge: BadgeFile = None,
    seed: SecretSeed = None,
    within: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="The check ends after this time. Default: 3600; --quick 900, --thorough 21600.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight. Default: 8.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and draws.")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="More and longer prompts, more draws.")
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List groups of checks, with --only their checks; run nothing.")
    ] = False,
) -> None:
    """Compare a server's log-probabilities, samples and answers with the reference.

    Exit status 0: every check holds; 1: one fails; 2: nothing could be compared with the reference, or the
    time was over.
    """
    bench_run.check_files(None, html, json_file, junit, sarif, badge)
    if quick and thorough:
        raise ValueError("--quick and --thorough exclude each other")

    from dataclasses import replace

    from diptych.shared.tools.conformance.server.checks import QUICK, THOROUGH, Limits, chosen, run_checks

    if list_all:
        print_list(chosen(only or (), skip or ()), has_names=bool(only))
        return
    if url is None or model is None:
        raise ValueError("name the server's URL and --model, what it serves; --list shows what is checked")
    from diptych.shared.tools.conformance.server.session import connect
    from diptych.shared.tools.conformance.server.verdict import Report as Found
    from diptych.shared.tools.conformance.server.verdict import print_report

    checks = chosen(only or (), skip or ())
    limits = QUICK if quick else THOROUGH if thorough else Limits()
    if concurrency is not None:
        limits = replace(limits, concurrency=concurrency)
    seconds = within or SECONDS["quick" if quick else "thorough" if thorough else ""]
    check_named(url, model, dtype, seeded, tool_call_parser)
    end = Announced(f"{len(checks)} checks of {url}", seconds, seed := drawn(seed))
    with _progress(len(checks) + 1) as progress:
        with in_time(end.ends_at):
            context = connect(
                url,
                model,
                api_key=api_key,
                served_model=served_model,
                dtype=dtype,
                seed=seed,
                limits=limits,
                progress=progress,
                tool_call_parser=tool_call_parser,
                seeded=seeded,
                ends_at=end.ends_at,
            )
        results = list(run_checks(context, checks))
    facts = {
        "server": context.server.url,
        "kind": context.offers.kind or "unknown",
        "model": model,
        "dtype": context.dtype,
        "seed": str(seed),
    }
    context.server.close()
    is_over = time.monotonic() > end.ends_at
    report = Found(facts, context.offers, results, len(checks), is_over, end.late)
    print_report(report)
    report.for_ci().write(junit, sarif, badge)
    if html is not None:
        from diptych.shared.tools.conformance.server.server_report_html import render

        html.write_text(render(report), encoding="utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1, default=str) + "\n", encoding="utf-8")
    if report.exit_status:
        raise typer.Exit(report.exit_status)


def check_named(url: str, model: str, dtype: str, seeded: str, tool_call_parser: str) -> None:
    """Raises `ValueError` for what is no URL, a model without files, or a number format, noise or form of
    calls that is not known, before the server is asked."""
    from diptych.shared.config import read_config
    from diptych.shared.dialects.parts.choose import choose_dialect
    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.text.tokenizer import Tokenizer
    from diptych.shared.tools.conformance.server.client import check_url
    from diptych.shared.tools.conformance.server.logprob_tolerance import tolerance_of
    from diptych.shared.tools.conformance.server.session import check_noise

    check_url(url)
    check_noise(seeded)
    folder = resolve_model_path(model)
    choose_dialect(Tokenizer.from_pretrained(folder), tool_call_parser)
    read_config(folder)
    tolerance_of(dtype, folder)


@contextmanager
def in_time(ends_at: float) -> Iterator[None]:
    """Raises `ValueError` if the block does not end in time."""
    from diptych.shared.tools.conformance.clauses.time_limit import TimeLimitExceeded, time_limit, until

    try:
        with time_limit(until(ends_at)):
            yield
    except TimeLimitExceeded:
        raise ValueError("the time was over before the first check: --within can be larger") from None


def print_list(checks: Sequence[Check], has_names: bool) -> None:
    """A line for each group, or for each check."""
    from rich.console import Console
    from rich.text import Text

    from diptych.shared.tools.conformance.server.checks import GROUPS

    console = Console()
    if has_names:
        for each in checks:
            console.print(Text.assemble(each.name, "  ", (each.sentence, "dim")))
        return
    for group, question in GROUPS.items():
        num = sum(each.group == group for each in checks)
        console.print(Text(f"{group:10} {num:3}  {question}"))
    console.print(Text(f"{len(checks)} checks. --list --only GROUP names those of a group.", "dim"))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal's stderr that names the current check."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns: tuple[Any, ...] = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
