"""Whole runs of the check against this project's own server, which must raise no alarm.

python -m tests.server_check.false_alarms --runs 50 --dtype bfloat16 --jobs 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing.util
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, NamedTuple

from diptych.shared.tools.conformance.server.checks import QUICK, Context, Result, chosen, run_checks
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.session import connect
from tests.planted import Bug
from tests.server_check.local_server import LocalServer, local_server


class Run(NamedTuple):
    seed: int
    num_cases: int
    statuses: Counter[str]
    alarms: dict[str, list[str]]
    seconds: float


def alarms(results: list[Result]) -> dict[str, list[str]]:
    """Failing checks with what they found."""
    return {
        result.check.name: [finding.what for finding in result.findings if finding.status == "fails"]
        for result in results
        if result.status == "fails"
    }


def found_in(server: LocalServer, context: Context, bug: Bug) -> dict[str, str]:
    """The finder of a planted fault, if it fails, and what it says."""
    server.proxy.plant(bug.plant)
    try:
        context = replace(context, seed=1, answers=[], pairs=None, call_mode=None)
        found = alarms(list(run_checks(context, chosen([bug.finder]))))
        return {name: "; ".join(what) for name, what in found.items()}
    finally:
        server.proxy.plant(None)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a run raised an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--panel", default="reference", choices=("reference", "optimized"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--use", default="", help="components of the server: attention=triton")
    parser.add_argument("--model", default="tiny-dense")
    parser.add_argument("--only", default="", help="groups or checks: scoring,streaming")
    parser.add_argument("--concurrency", type=int, default=QUICK.concurrency, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new run after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a server")
    options = parser.parse_args(arguments)
    seeds = range(options.first_seed, options.first_seed + options.runs)
    statuses, found, num_cases, runs = Counter[str](), Counter[str](), 0, []
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes do not compete for the CPU
    spawn = multiprocessing.get_context("spawn")
    start = time.monotonic()
    with ProcessPoolExecutor(options.jobs, spawn, _start, (options,)) as pool:
        for future in as_completed([pool.submit(_run, seed, start + options.seconds) for seed in seeds]):
            if (result := future.result()) is None:
                continue
            runs.append(result)
            num_cases += result.num_cases
            statuses.update(result.statuses)
            for name, what in result.alarms.items():
                found[name] += 1
                print(f"seed {result.seed}: {name}: {what[0]}", flush=True)
            count = f"{len(runs)} of {len(seeds)} runs, {sum(found.values())} alarms"
            print(f"{count}, {result.seconds:.1f} s for this one", flush=True)
    summary = {
        "panel": options.panel, "device": options.device, "dtype": options.dtype, "model": options.model,
        "runs": len(runs), "checks": len(chosen(_names(options))), "cases": num_cases,
        "statuses": dict(statuses), "alarms": dict(found), "seconds": round(time.monotonic() - start),
    }  # fmt: skip
    print(json.dumps(summary))
    return int(bool(found))


def _names(options: argparse.Namespace) -> list[str]:
    return options.only.split(",") if options.only else []


_process: list[tuple[LocalServer, Oracle, argparse.Namespace]] = []  # of this process of the pool


def _start(options: argparse.Namespace) -> None:
    """Start the server of this process, which ends with it."""
    flags: dict[str, Any] = {name: getattr(options, name) for name in ("model", "panel", "device", "dtype")}
    if options.use:
        flags["use"] = dict(each.split("=", 1) for each in options.use.split(","))
    stack = contextlib.ExitStack()
    server = stack.enter_context(local_server(**flags))
    multiprocessing.util.Finalize(None, stack.close, exitpriority=1)
    _process.append((server, Oracle(options.model), options))


def _run(seed: int, end: float) -> Run | None:
    """All checks with the prompts and samples of `seed`. None: the time `end` is past."""
    begin = time.monotonic()
    if begin > end:
        return None
    server, oracle, options = _process[0]
    limits = replace(QUICK, concurrency=options.concurrency)
    context = connect(server.url, options.model, dtype=options.dtype, seed=seed, limits=limits, oracle=oracle)
    results = list(run_checks(context, chosen(_names(options))))
    context.server.close()
    return Run(
        seed,
        sum(result.num_cases for result in results),
        Counter(result.status for result in results),
        alarms(results),
        time.monotonic() - begin,
    )


if __name__ == "__main__":
    raise SystemExit(main())
