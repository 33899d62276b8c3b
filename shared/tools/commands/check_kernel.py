"""`diptych check kernel`: compares a bare function with the exact result of one operation, and times it."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from diptych.shared.tools.commands import bench_run, kernel_output
from diptych.shared.tools.commands.announced import Announced, drawn
from diptych.shared.tools.commands.report_options import BadgeFile, JsonFile, JunitFile, SarifFile, SecretSeed

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
    from diptych.shared.tools.conformance.kernels.kernel_report import Report
    from diptych.shared.tools.conformance.kernels.problem import Like, Problem
    from diptych.shared.tools.conformance.kernels.rank_processes import RankProcesses


def check_kernel(
    target: Annotated[
        str | None,
        typer.Argument(help="The function: file.py:function or package.module:function.", show_default=False),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="OPERATION", help="The operation. --list shows all.", show_default=False),
    ] = None,
    convention: Annotated[
        str,
        typer.Option(
            metavar="LIBRARY", help="Whose arguments, shapes and layouts the function has. --list shows all."
        ),
    ] = "torch",
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", metavar="TEXT", help="Only cases with this in the name: bfloat16. May be repeated."
        ),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="FEATURE", help="Also check: window. May be repeated."),
    ] = None,
    definition: Annotated[
        Path | None,
        typer.Option(
            metavar="DEF.json",
            help="Of FlashInfer Trace; the target is a Solution, a .json file, or a function.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A file of KernelBench with Model, or a folder of GPU MODE with task.yml.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="W.jsonl",
            help="Workloads of the Definition: cases of an operation that --list does not have.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="all_reduce: the number of processes. Default: 3.", show_default=False
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=0.001, help="Seconds that one call may take before it counts as failed.")
    ] = 60.0,
    within: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="The check ends after this time."),
    ] = 600.0,
    seed: SecretSeed = None,
    timing: Annotated[bool, typer.Option(help="Time the function on growing sizes.")] = True,
    list_all: Annotated[
        bool,
        typer.Option(
            "--list", help="List operations and conventions, with --like also shapes, and run nothing."
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots of error and speed.")
    ] = None,
    json_file: JsonFile = None,
    junit: JunitFile = None,
    sarif: SarifFile = None,
    badge: BadgeFile = None,
) -> None:
    """Check a bare function against float64: awkward sizes, NaN in unused memory, other pages, strided rows.

    Exit status 0: every case holds; 1: a case fails; 2: nothing could be checked.
    """
    from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
    from diptych.shared.tools.conformance.kernels.collective_likes import all_reduce_like
    from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of, operation_of
    from diptych.shared.tools.conformance.kernels.run import check_arguments, check_kernel, running
    from diptych.shared.tools.conformance.kernels.target import check_named

    if list_all:
        kernel_output.print_list(like)
        return
    files = Files(html, json_file, junit, sarif, badge)
    bench_run.check_files(None, *files)
    if definition is not None:
        reports, end = solution_reports(target, definition, workload, time_limit, within, seed)
        for each in reports[:-1]:
            lines = [f"the Definition's own reference: {each.summary}"]
            lines += [f"  {verdict.case}: {verdict.failure}" for verdict in each.failing[:3]]
            print(*lines, *each.notes, sep="\n")
        finish(reports[-1], files, end)
        return
    if task is not None:
        report, end = task_report(target, task, time_limit, within, seed, timing)
        finish(report, files, end)
        return
    if target is not None and target.endswith(".json"):
        raise ValueError(
            f"{target}: a Solution of FlashInfer Trace is checked with its --definition DEF.json"
        )
    if target is None or like is None:
        raise ValueError(f"name a function and what it is --like: {', '.join(LIKES)}")
    like = operation_of(like)
    chosen_convention = convention_of(like, convention)
    operation = LIKES[like]
    if ranks is not None:
        if not operation.ranks:
            raise ValueError(f"--ranks does not apply to {like}: it is of one process")
        operation = all_reduce_like(ranks)
    cases = chosen_cases(operation, case or [], features or [])
    check_named(target)
    seed = drawn(seed)
    end = Announced(f"{len(cases)} cases of {like}", within, seed)
    with running(target, operation, time_limit, end.ends_at) as function:
        child = function if isinstance(function, ChildFunction) else None
        check_arguments(target, operation, chosen_convention, cases, features or [], child)
        report = check_kernel(function, target, operation, chosen_convention, cases, time_limit, seed)
        if timing and not report.status:
            add_timings(report, function, end.ends_at)
        if child is not None and not report.status:
            add_operators(report, child, operation.make(cases[-1], chosen_convention.takes_scale, seed))
    finish(report, files, end)


def add_operators(report: Report, child: ChildFunction, problem: Problem) -> None:
    """A function that finds that it is watched, and ends its process or does not return, fails this case."""
    from diptych.shared.tools.conformance.clauses.compare import Mismatch
    from diptych.shared.tools.conformance.kernels.one_call import sentence

    try:
        report.operators = child.operators(report.convention.build(problem))
    except Mismatch as mismatch:
        report.verdicts[-1].failure = f"one more call: {sentence(mismatch)}"
        report.names = [str(report.verdicts[-1].failure)]


def add_timings(report: Report, function: ChildFunction | RankProcesses, ends_at: float) -> None:
    """Times growing sizes until the time is over."""
    from diptych.shared.tools.bench.bare_kernel import time_sizes
    from diptych.shared.tools.conformance.clauses.device import check_device
    from diptych.shared.tools.conformance.clauses.time_limit import TimeLimitExceeded, time_limit, until

    left = len(report.like.timed(check_device().type))
    with suppress(TimeLimitExceeded), time_limit(until(ends_at)):
        for verdict, seconds in time_sizes(function, report.like, report.convention, report.seed):
            if time.monotonic() > ends_at:
                break
            report.verdicts.append(verdict)
            report.timings += [] if seconds is None else [seconds]
            left -= 1
        else:
            return
    report.num_not_run = left


class Files(NamedTuple):
    html: Path | None
    json: Path | None
    junit: Path | None
    sarif: Path | None
    badge: Path | None


def finish(report: Report, files: Files, end: Announced) -> None:
    """Prints and writes the report, and exits with its status. `end`: the announced time."""
    report.notes += end.late
    kernel_output.print_report(report)
    report.for_ci().write(files.junit, files.sarif, files.badge)
    if files.json is not None:
        files.json.write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    if files.html is not None:
        from diptych.shared.tools.conformance.kernels.kernel_report_html import render

        files.html.write_text(render(report), encoding="utf-8")
    if report.status:
        raise typer.Exit(report.status)


def solution_reports(
    target: str | None,
    definition: Path,
    workload: Path | None,
    time_limit: float,
    within: float,
    seed: int | None,
) -> tuple[list[Report], Announced]:
    from diptych.shared.tools.conformance.formats import trace_check, trace_files

    read = trace_files.read_definition(definition)
    solution = None
    if target is not None and ".py:" in target:
        solution = trace_files.solution_of_function(target, read)
    elif target is not None:
        if not target.endswith(".json"):
            raise ValueError(f"{target}: --definition compares file.py:function, or a Solution, a .json file")
        solution = trace_files.read_solution(Path(target))
    if solution is not None and solution.definition != read.name:
        raise ValueError(f"{target} is a Solution of {solution.definition}, not of {read.name}")
    workloads = [] if workload is None else trace_files.read_workloads(workload, read)
    seed = drawn(seed)
    end = Announced(
        f"Definition {read.name}{trace_check.memory_of_cases(read, solution is None)}", within, seed
    )
    reports = trace_check.check_solution(
        read, solution, workloads, seconds=time_limit, ends_at=end.ends_at, seed=seed
    )
    return reports, end


def task_report(
    target: str | None,
    path: Path,
    time_limit: float,
    within: float,
    seed: int | None,
    timing: bool,
) -> tuple[Report, Announced]:
    from diptych.shared.tools.conformance.formats.tasks import read_task
    from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
    from diptych.shared.tools.conformance.kernels.run import check_kernel

    if target is None:
        raise ValueError("--task: name the file of the submission")
    task = read_task(path, target)
    seed = drawn(seed)
    end = Announced(f"{len(task.like.cases)} cases of the task {task.like.name}", within, seed)
    with ChildFunction(task.target, time_limit, end.ends_at, task.folder) as function:
        report = check_kernel(function, target, task.like, task.convention, None, time_limit, seed)
        if timing and not report.status:
            add_timings(report, function, end.ends_at)
    return report, end


def chosen_cases(like: Like, texts: list[str], features: list[str]) -> tuple[Any, ...]:
    """The cases of the operation and of the features; with `texts`, those whose name contains every text."""
    for feature in features:
        if feature not in like.more_cases:
            known = ", ".join(like.more_cases) or "none"
            raise ValueError(f"--with {feature}: features of {like.name} to check are {known}")
    cases = (*like.cases, *(case for feature in features for case in like.more_cases[feature]))
    chosen = tuple(case for case in cases if all(text in case.name for text in texts))
    if not chosen:
        raise ValueError(f"no case of {like.name} has {' and '.join(texts)} in its name")
    return chosen


def as_json(report: Report) -> dict[str, Any]:
    def finite(fields: dict[str, Any]) -> dict[str, Any]:
        """None for NaN, which JSON cannot represent."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }

    score = report.score
    return {
        "target": report.target,
        "like": report.like.name,
        "convention": report.convention.library,
        "device": report.device,
        "status": report.status,
        "summary": report.summary,
        "seed": report.seed,
        "operators": report.operators,
        "mistakes": report.names,
        "notes": report.notes,
        "cases": [finite(asdict(verdict)) for verdict in report.verdicts],
        "timings": [asdict(timing) for timing in report.timings],
        "score": None if score is None else {"mean share of the bound": score[0], "least at": score[1].case},
    }
