"""Mutation campaign: change the source in one place, and see whether a test notices.

    make mutants                                            # 200 mutants of the engine
    python -m tests.mutation -n 50 --seed 1 reference       # 50 other mutants of one folder
    python -m tests.mutation --record tests/sampler         # after a change of these tests
    python -m tests.mutation --retry                        # the survivors again
    python -m tests.mutation --gpu -n 100 --json FILE       # code that only a GPU reaches, on a GPU

The first run records which tests run which line, folder by folder: about half an hour on two cores. Each
mutant is written into a copy of the tree in build/mutants, and a fork of this process runs the tests that
reach its line. A run that was interrupted goes on where it stopped, also on another computer that has the
files coverage, times.json, recorded.json and results.jsonl of build/mutants. survivors.md has what no test
noticed, as diffs.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import hashlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

import tests.conftest  # noqa: F401, the environment of the tests, before triton is imported
from tests.house.tree import ROOT
from tests.mutation import gpu
from tests.mutation.attempt import Worker, copy_tree
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.record import Recording, digest, record, recorded

BUILD = ROOT / "build" / "mutants"
SHARED = ("engine", "sampling", "scheduling", "text")
FOLDERS = ["reference", "optimized", *(f"shared/{name}" for name in SHARED)]
# Launchers choose tile sizes, which change times only; tests/kernels has planted bugs of the kernels.
LEFT_OUT = ("optimized/kernels/",)
TESTS = [
    *("attention", "config", "conformance", "engine", "grammar", "kernels", "loading", "memory_pool"),
    *("model_runner", "models", "moe", "parallel", "quantization", "radix_cache", "sampler", "scheduler"),
    *("scheduling", "server", "speculative", "text"),
]
EQUIVALENT = Path(__file__).with_name("equivalent.json")
KILLED = ("killed", "out of time")


def sample(folders: list[str], count: int, seed: int) -> list[Mutant]:
    """The first `count` mutants in an order that depends on the seed and on each mutant, so that a change of
    one file leaves the others of the sample as they are."""
    paths = [p for folder in folders for p in (sorted((ROOT / folder).rglob("*.py")) or [ROOT / folder])]
    names = list(dict.fromkeys(str(path.relative_to(ROOT)) for path in paths))
    names = [name for name in names if not name.startswith(LEFT_OUT) or folders != FOLDERS]
    mutants = [mutant for name in names for mutant in mutants_of(name, (ROOT / name).read_bytes())]
    return sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest())[:count]


_worker: list[Worker] = []  # of this process of the pool


def _start(numbers: Any, folder: Path, budget: float, gpus: int) -> None:
    number = numbers.get()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    recording = gpu.GpuTests(folder) if gpus else Recording(folder)
    _worker.append(Worker(folder / f"tree-{number}", recording, budget))
    _worker[0].warm_up()


def _attempt(mutant: Mutant) -> dict[str, Any]:
    return _worker[0].attempt(mutant)


def campaign(
    mutants: list[Mutant], folder: Path, workers: int, budget: float, is_retry: bool = False, gpus: int = 0
) -> dict[str, dict[str, Any]]:
    """Mutant key -> result, for all of them; what results.jsonl has is not tried again. `gpus`: how many GPUs
    the workers share; 0: the tests are those that need none."""
    log = folder / "results.jsonl"
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    results = {result["mutant"]: result for result in known}
    files = {mutant.path: digest((ROOT / mutant.path).read_bytes()) for mutant in mutants}
    done = {
        m.key for m in mutants
        if m.key in results and results[m.key]["file"] == files[m.path]
        and not (is_retry and results[m.key]["result"] not in KILLED)
    }  # fmt: skip
    missing = [mutant for mutant in mutants if mutant.key not in done and mutant.key not in equivalent()]
    if missing:
        for name in ("hypothesis", "pytest", "torch", "transformers", "triton"):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)  # once, for all forks
        gc.freeze()
        context = multiprocessing.get_context("fork")
        numbers = context.SimpleQueue()
        for number in range(workers):
            numbers.put(number)
        with context.Pool(workers, _start, (numbers, folder, budget, gpus)) as pool, log.open("a") as file:
            for result in tqdm(pool.imap_unordered(_attempt, missing), "mutants", total=len(missing)):
                results[result["mutant"]] = result
                file.write(json.dumps(result) + "\n")
                file.flush()
                if result["result"] == "survived":
                    tqdm.write(f"survived: {result['mutant']}")
    return results


def equivalent() -> dict[str, str]:
    """Mutant key -> why no test can notice it."""
    return json.loads(EQUIVALENT.read_text())


def table(mutants: list[Mutant], results: dict[str, dict[str, Any]], folders: Sequence[str] = FOLDERS) -> str:
    """Markdown, one row per folder. Lines of optimized/ that no test reaches without a GPU do not count."""
    rows = defaultdict(Counter)
    for mutant in mutants:
        folder = next(f for f in [*folders, mutant.path] if mutant.path.startswith(f))
        result = "equivalent" if mutant.key in equivalent() else results[mutant.key]["result"]
        if result == "not reached" and folder != "optimized":
            result = "survived"
        for name in (folder, "all"):
            rows[name][result] += 1
    columns = ("killed", "out of time", "survived", "not reached", "equivalent")
    lines = [f"| folder | mutants | {' | '.join(columns)} | share |", "|---|" + "--:|" * (len(columns) + 2)]
    for name in [*(name for name in rows if name != "all"), "all"]:
        row = rows[name]
        killed = row["killed"] + row["out of time"]
        counted = killed + row["survived"]
        share = f"{100 * killed / counted:.1f} %" if counted else ""
        lines.append(
            f"| {name} | {sum(row.values())} | {' | '.join(str(row[c]) for c in columns)} | {share} |"
        )
    return "\n".join(lines)


def survivors(mutants: list[Mutant], results: dict[str, dict[str, Any]]) -> str:
    """Markdown: the diff of each mutant that was not killed."""
    texts = []
    for mutant in mutants:
        result = results.get(mutant.key)  # none of an equivalent one
        if result and mutant.key not in equivalent() and result["result"] not in KILLED:
            source = (ROOT / mutant.path).read_bytes()
            old, new = (t.decode().splitlines(keepends=True) for t in (source, mutant.apply(source)))
            diff = "".join(difflib.unified_diff(old, new, mutant.path, mutant.path))
            head = f"{result['result']}, {result['tests']} tests"
            texts.append(f"## {json.dumps(mutant.key)}\n\n{head}\n\n```diff\n{diff}```\n")
    return "\n".join(texts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="what to change; with --record: tests")
    parser.add_argument("-n", "--count", type=int, default=200, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants tried at a time")
    parser.add_argument("--seconds", type=float, default=40, help="tests that are run for one mutant")
    parser.add_argument("--retry", action="store_true", help="try again what was not killed")
    parser.add_argument(
        "--record", action="store_true", help="record these tests (default: the missing ones)"
    )
    parser.add_argument("--gpu", action="store_true", help="code that only a GPU reaches, with tests on it")
    parser.add_argument("--json", type=Path, help="write the results and the survivors to this file")
    options = parser.parse_args(arguments)
    try:
        return on_gpus(options) if options.gpu else on_the_cpu(options)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130


def on_the_cpu(options: argparse.Namespace) -> int:
    if options.record and options.folders != FOLDERS:
        missing = options.folders
    else:
        missing = [f"tests/{name}" for name in TESTS if f"tests/{name}" not in recorded(BUILD)["tests"]]
    if missing:
        copy_tree(BUILD / "tree-0")
    for name in missing:
        print(f"recording {name}", flush=True)
        record(BUILD / "tree-0", BUILD, name, options.workers)
    if options.record:
        return 0
    mutants = sample(options.folders, options.count, options.seed)
    results = campaign(mutants, BUILD, options.workers, options.seconds, options.retry)
    report(options, BUILD, mutants, results, FOLDERS)
    return 0


def on_gpus(options: argparse.Namespace) -> int:
    """This process starts no CUDA context: its forks could not use it."""
    folder = BUILD / "gpu"
    if options.record or not (folder / "times.json").exists():
        gpu.record(folder, options.workers)
    if options.record:
        return 0
    folders = gpu.FOLDERS if options.folders == FOLDERS else options.folders
    mutants = sample(folders, options.count, options.seed)
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    gpus = max(1, int(subprocess.run(count, capture_output=True, text=True, check=True).stdout))
    results = campaign(mutants, folder, options.workers, options.seconds, options.retry, gpus)
    report(options, folder, mutants, results, [*gpu.FOLDERS])
    return 0


def report(
    options: argparse.Namespace, folder: Path, mutants: list[Mutant], results: dict[str, Any], rows: list[str]
) -> None:
    """survivors.md, the table on standard output, and the file of --json."""
    (folder / "survivors.md").write_text(survivors(mutants, results))
    print(table(mutants, results, rows))
    if options.json:
        chosen = [results[mutant.key] for mutant in mutants if mutant.key in results]
        counts = Counter(result["result"] for result in chosen)
        record = {"counts": counts, "results": chosen, "survivors": survivors(mutants, results)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
