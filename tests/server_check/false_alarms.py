"""Whole runs of the check against this project's own server, which must raise no alarm.

python -m tests.server_check.false_alarms --runs 50 --dtype bfloat16 --jobs 8
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shared.conformance.server.checks import QUICK, Result, chosen, run_checks
from shared.conformance.server.oracle import Oracle
from shared.conformance.server.session import connect
from tests.server_check.local_server import local_server


def alarms(results: list[Result]) -> dict[str, list[str]]:
    """Failing checks with what they found."""
    return {
        result.check.name: [finding.what for finding in result.findings if finding.status == "fails"]
        for result in results
        if result.status == "fails"
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--panel", default="reference", choices=("reference", "optimized"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--use", default="", help="components of the server: attention=triton")
    parser.add_argument("--model", default="tiny-dense")
    parser.add_argument("--concurrency", type=int, default=QUICK.concurrency, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new run after this time")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, each with a server and some of the runs"
    )
    options = parser.parse_args(arguments)
    if options.jobs > 1:
        return in_processes(list(sys.argv[1:] if arguments is None else arguments), options)
    return run(options)


def in_processes(arguments: list[str], options: argparse.Namespace) -> int:
    """The largest exit status. Each process prints its own lines."""
    seeds = range(options.first_seed, options.first_seed + options.runs)
    command = [sys.executable, "-m", "tests.server_check.false_alarms", *arguments, "--jobs", "1"]
    jobs = []
    for i in range(options.jobs):
        own = seeds[len(seeds) * i // options.jobs : len(seeds) * (i + 1) // options.jobs]
        if own:
            more = ["--first-seed", str(own[0]), "--runs", str(len(own))]
            jobs.append(subprocess.Popen([*command, *more]))
    return max(job.wait() for job in jobs)


def run(options: argparse.Namespace) -> int:
    """1 if a run raised an alarm."""
    checks = chosen()
    flags: dict[str, Any] = {
        "model": options.model,
        "panel": options.panel,
        "device": options.device,
        "dtype": options.dtype,
    }
    if options.use:
        flags["use"] = dict(each.split("=", 1) for each in options.use.split(","))
    num_runs, num_cases, statuses, found = 0, 0, Counter[str](), Counter[str]()
    start = time.monotonic()
    limits = replace(QUICK, concurrency=options.concurrency)
    with local_server(**flags) as server:
        oracle = Oracle(options.model)
        for seed in range(options.first_seed, options.first_seed + options.runs):
            if time.monotonic() - start > options.seconds:
                break
            context = connect(
                server.url, options.model, dtype=options.dtype, seed=seed, limits=limits, oracle=oracle
            )
            results = list(run_checks(context, checks))
            context.server.close()
            num_runs += 1
            num_cases += sum(result.num_cases for result in results)
            statuses.update(result.status for result in results)
            for name, what in alarms(results).items():
                found[name] += 1
                print(f"seed {seed}: {name}: {what[0]}", flush=True)
            seconds = (time.monotonic() - start) / num_runs
            print(f"{num_runs} runs, {sum(found.values())} alarms, {seconds:.1f} s each", flush=True)
    counts = ", ".join(f"{name} {num}" for name, num in sorted(statuses.items()))
    print(f"{num_runs} runs of {len(checks)} checks, {num_cases:,} cases: {counts}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
