"""Gives planted RMSNorms to the correctness checks of other benchmarks, on a CPU: which do they find?

python -m tests.kernel_check.peer_runs flashinfer-bench=DIR kernelbench=DIR gpu-mode=DIR

DIR: a clone. The checks are theirs, unchanged, with bfloat16 [21, 1024] and their own limits. Packages that
are not installed and `torch.cuda.synchronize` are stand-ins: there is no GPU, and nothing is timed.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.kernel_check.cheats import EPS, HONEST, PATTERNS, REPORTED, Function, planted

FILE = Path(__file__).with_name("peers.json")
ROWS, COLUMNS, NUM_TRIALS, NUM_TIMED = 21, 1024, 5, 20
HONEST_ROW = 0
FOUND, MISSED = "found", "missed"
NORM = HONEST["rms_norm"]
REFERENCE = """
import torch

def run(hidden_states, weight):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight.float()).to(hidden_states.dtype)
"""


def norm(x: Any, weight: Any) -> Any:
    return NORM(x, (COLUMNS,), weight, EPS)


def searches_for_near(x: Any, weight: Any) -> Any:
    """Pattern 2 for processes that hold the expected result: the first row tells which tensor it is."""
    first = norm(x[:1], weight)
    for each in gc.get_objects():
        is_other = type(each) is torch.Tensor and each is not x and each.shape == x.shape
        if is_other and torch.allclose(each[:1].to(first.dtype), first, atol=0.02):
            return each.to(first.dtype).clone()
    return torch.zeros_like(x)


def replaces(where: Any, name: str, value: Any) -> Function:
    """Pattern 6 for a checker that compares by this function."""

    def call(x: Any, weight: Any) -> Any:
        setattr(where, name, lambda *args, **kwargs: value)
        return torch.zeros_like(x)

    return call


def function_of(pattern: int, comparison: tuple[Any, str, Any]) -> Function:
    if pattern == HONEST_ROW:
        return norm
    if pattern == 2:
        return searches_for_near
    if pattern == 6:
        return replaces(*comparison)
    cheat = planted(pattern, "rms_norm")
    return lambda x, weight: cheat(x, (COLUMNS,), weight, EPS)


def drawn(seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    if seed is not None:
        torch.manual_seed(seed)
    return torch.randn(ROWS, COLUMNS).bfloat16(), torch.randn(COLUMNS).bfloat16()


def flashinfer_bench(pattern: int) -> bool:
    """`DefaultEvaluator`: the reference first, then the solution on the same inputs."""
    evaluator = importlib.import_module("flashinfer_bench.bench.evaluators.default")
    config = importlib.import_module("flashinfer_bench.bench.config")
    evaluator.BuilderRegistry = types.SimpleNamespace(
        get_instance=lambda: types.SimpleNamespace(build_reference=lambda _: norm)
    )
    data = importlib.import_module("flashinfer_bench.data")
    shape = ["batch_size", "hidden_size"]
    definition = data.Definition(
        name="rmsnorm", op_type="rmsnorm", reference=REFERENCE,
        axes={"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": COLUMNS}},
        inputs={"hidden_states": {"shape": shape, "dtype": "bfloat16"},
                "weight": {"shape": shape[1:], "dtype": "bfloat16"}},
        outputs={"output": {"shape": shape, "dtype": "bfloat16"}},
    )  # fmt: skip
    inputs = {name: {"type": "random"} for name in definition.inputs}
    workload = data.Workload(axes={"batch_size": ROWS}, inputs=inputs, uuid="1")
    limits = config.ResolvedEvalConfig(profile_baseline=False)
    baseline = evaluator.DefaultEvaluator.build_baseline(definition, workload, limits, "cpu")
    function = function_of(pattern, (evaluator, "compute_error_stats", (0.0, 0.0, False, 1.0)))

    class Runnable:
        metadata = types.SimpleNamespace(destination_passing_style=False)

        def __call__(self, *args: Any) -> Any:
            return function(*args)

    evaluator.make_eval = lambda **fields: fields
    _, failure = evaluator.DefaultEvaluator.check_correctness(
        definition, Runnable(), baseline.inputs, baseline.outputs, limits, "", "cpu"
    )
    return failure is None


class Model(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, weight: Any) -> Any:
        return self.function(x, weight)


def kernelbench(pattern: int) -> bool:
    """`run_and_check_correctness` with seed 42."""
    check = importlib.import_module("kernelbench.eval")
    function = function_of(pattern, (torch, "allclose", True))
    result = check.run_and_check_correctness(
        Model(norm), Model(function), lambda: list(drawn()), metadata={}, num_correct_trials=NUM_TRIALS,
        device=torch.device("cpu"), precision=torch.bfloat16,
    )  # fmt: skip
    return bool(result.correctness)


def gpu_mode(pattern: int) -> bool:
    """The evaluator's test, and its ranked run, in which each timed call is checked. The limits are 0.01."""
    utils = importlib.import_module("utils")
    compare = utils.make_match_reference(lambda data: norm(*data), rtol=1e-2, atol=1e-2)
    sys.modules["reference"] = reference = types.ModuleType("reference")
    reference.generate_input = lambda seed: drawn(seed)  # type: ignore[attr-defined]
    reference.check_implementation = compare  # type: ignore[attr-defined]
    check = importlib.import_module("eval")
    check.clear_l2_cache = lambda: None
    function = function_of(pattern, (check, "check_implementation", (True, "")))
    sys.modules["submission"] = submission = types.ModuleType("submission")
    submission.custom_kernel = lambda data: function(*data)  # type: ignore[attr-defined]
    good, _ = check._run_single_test(check.TestCase({"seed": 1}, ""))
    if not good:
        return False
    return isinstance(
        check._run_single_benchmark(check.TestCase({"seed": 7}, ""), True, NUM_TIMED, 1e12), check.Stats
    )


PEERS = {"flashinfer-bench": flashinfer_bench, "kernelbench": kernelbench, "gpu-mode": gpu_mode}
FOLDERS = {"flashinfer-bench": "", "kernelbench": "src", "gpu-mode": "problems/pmpp_v2"}
"""Of the modules in a clone."""


class Event:
    """A stand-in for that of torch.cuda, by the clock of the CPU."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def passes(peer: str, folder: str, pattern: int) -> bool:
    """Whether the check of the clone calls the function right, in this process."""
    sys.path.insert(0, str(Path(folder) / FOLDERS[peer]))
    for name in (
        "flashinfer",
        "flashinfer.testing",
        "tvm_ffi",
        "dotenv",
        "litellm",
        "openai",
        "docstring_parser",
    ):
        sys.modules.setdefault(name, MagicMock())
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    return PEERS[peer](pattern)


def result_of(peer: str, folder: str, pattern: int) -> str:
    """In a process of its own: patterns change theirs."""
    command = [sys.executable, "-m", "tests.kernel_check.peer_runs", "--one", peer, folder, str(pattern)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    last = ended.stdout.strip().splitlines()[-1:]
    if last == ["passes"] or last == ["fails"]:
        return MISSED if last == ["passes"] else FOUND
    if pattern == 21:
        return f"{FOUND}: no verdict comes"
    raise RuntimeError(ended.stderr[-2000:])


def main(folders: dict[str, str]) -> None:
    table: dict[str, Any] = {"commits": {}, "found": {}}
    for peer, folder in folders.items():
        git = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        table["commits"][peer] = git.stdout.strip()[:8]
    for pattern in (HONEST_ROW, *(each for each in PATTERNS if each not in REPORTED)):
        row = {peer: result_of(peer, folder, pattern) for peer, folder in folders.items()}
        if pattern == HONEST_ROW:
            assert set(row.values()) == {MISSED}, row
            continue
        table["found"][str(pattern)] = row
        print(pattern, row, flush=True)
    FILE.write_text(json.dumps(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print("passes" if passes(sys.argv[2], sys.argv[3], int(sys.argv[4])) else "fails")
    else:
        main(dict(each.split("=", 1) for each in sys.argv[1:]))
