"""The seconds of a start, by phase: processes that start an engine and answer one request.

Each start is a fresh process. *Cold*: Triton and FlashInfer have an empty folder of compiled kernels. *Warm*:
the folder of the cold start before. Files that were read before may be in the memory of the operating system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.shared.engine.quick_start import quick_start
from diptych.shared.tools.bench.serve_process import ROOT, own_server

CACHES = {"TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer", "CUDA_CACHE_PATH": "cuda"}
"""Environment variable -> folder of what a compiler keeps."""
PHASES = ("imports", "tokenizer", "weights", "pools", "kernels", "graphs", "rest", "first token")
TIME_LIMIT = 900.0


@dataclass
class Start:
    case: str
    seconds: dict[str, float]  # by phase, in their order
    compiled: list[list[Any]] = field(default_factory=list)  # compiler, kernel, was on disk, seconds
    num_compiled_later: int = 0  # kernels compiled by the first request

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def num_compiled(self, is_cached: bool) -> int:
        return sum(bool(each[2]) == is_cached for each in self.compiled)

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"total_s": self.total}


def with_caches(folder: Path) -> dict[str, str]:
    """The environment of a process whose compilers use this folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path} | {name: str(folder / part) for name, part in CACHES.items()}


def start_engine(case: str, flags: Mapping[str, Any], caches: Path, builds_modules: bool = False) -> Start:
    """Start an `LLM` in a new process and generate one token. Raises `ValueError` with its output if it
    fails. `builds_modules`: it waits for missing modules of FlashInfer in the end."""
    command = [sys.executable, "-m", "diptych.shared.tools.bench.startup", json.dumps(dict(flags))]
    command += ["--build"] * builds_modules
    begin = time.time()
    done = subprocess.run(
        command, env=with_caches(caches), capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"the engine did not start: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["seconds"]["imports"] += found.pop("begin") - begin
    return Start(case, **found)


def start_server(case: str, arguments: list[str], caches: Path) -> Start:
    """Seconds until `diptych serve` is ready."""
    begin = time.perf_counter()
    with own_server(arguments, env=with_caches(caches)):
        return Start(case, {"until ready": time.perf_counter() - begin})


def main() -> None:
    """The process of `start_engine`: prints its phases as one line of JSON."""
    begin = time.time()
    start = time.perf_counter()
    with quick_start():  # as the commands do
        from diptych.shared.engine.llm import LLM
        from diptych.shared.types import SamplingParams

        seconds = {"imports": time.perf_counter() - start}
        start = time.perf_counter()
        llm = LLM(**json.loads(sys.argv[1]))
    spent = time.perf_counter() - start
    seconds |= llm.assembly.seconds
    seconds["rest"] = spent - sum(llm.assembly.seconds.values())
    start = time.perf_counter()
    llm.generate([list(range(1, 33))], SamplingParams(max_new_tokens=1, ignore_eos=True), progress=False)
    seconds["first token"] = time.perf_counter() - start
    if "--build" in sys.argv:
        for module in getattr(llm.assembly.parts.model_runner.attention, "missing", ()):
            module.spec.build(verbose=False)
    compilations = llm.assembly.compilations
    found = {
        "begin": begin,
        "seconds": seconds,
        "compiled": [list(each) for each in compilations.before_ready],
        "num_compiled_later": compilations.num_after_ready,
    }
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the end of the process is not measured


if __name__ == "__main__":
    main()
