"""The kernels that are timed beside a function compute what the function must compute, on tiny shapes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.kernels import own_kernels, triton_interpreter
from diptych.shared.tools.conformance.kernels.attention_likes import make_mla
from diptych.shared.tools.conformance.kernels.conventions import LIKES
from diptych.shared.tools.conformance.kernels.draw_frequencies import frequency
from diptych.shared.tools.conformance.kernels.one_call import check_form, check_values
from diptych.shared.tools.conformance.kernels.problem import Problem
from diptych.shared.tools.conformance.kernels.verify_like import make_verify
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase
from tests.kernel_check import honest_runs, library_runs
from tests.kernel_check.cheat_runs import cases_of
from tests.kernel_check.library_runs import run_functions
from tests.kernel_check.many_seeds import Alarms, Ends, Record, Task, run_seeds
from tests.kernel_check.own_functions import OWN
from tests.kernel_check.right import RIGHT

MLA = MLACase("tiny", ((20, 1), (0, 1)), page_size=16, num_qo_heads=2, kv_lora_rank=32, qk_rope_head_dim=16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Problem]:
    """The problem as on a GPU: with the kernel."""
    monkeypatch.setattr(own_kernels, "on_gpu", lambda make, *args: make(*args))
    return lambda make, case: make(case, True)


def test_latent_attention(made: Callable[..., Problem]) -> None:
    problem = made(make_mla, replace(MLA, dtype=torch.float32))
    check(problem)


def check(problem: Problem) -> None:
    assert problem.ours is not None
    results = {"out": problem.ours()}
    check_form(problem, results, "ours")
    check_values(problem, results, "ours")


def test_verification_follows_the_target(made: Callable[..., Problem]) -> None:
    case = Case("tiny", vocab_size=8, num_drafts=2, sharpness=0.5, num_draws=96)
    problem = made(make_verify, case)
    assert problem.ours is not None
    ids = problem.ours()
    assert ids.shape == (96, 3)
    assert float((frequency(ids[:, 0], 8).cpu() - problem.expected["token 0"]).abs().max()) < 0.2
    drafts = problem["draft_token_ids"]
    for i in range(2):
        goes_on = ids[:, i + 1] >= 0
        assert torch.equal(goes_on, (ids[:, i] == drafts[:, i]) & (ids[:, i] >= 0))


@pytest.mark.parametrize("like", ["mla.decode", "w8a8", "sampler", "verify"])
def test_a_cpu_has_none(like: str) -> None:
    problem = LIKES[like].make(LIKES[like].timed("cpu")[0], True)
    assert (problem.ours is None) == (check_device().type == "cpu")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to bfloat16 as a GPU does."""
    registry.load("layers", "optimized")
    monkeypatch.setattr(triton_interpreter, "_PATCHED", set())
    if module := sys.modules.get(triton_interpreter.MODULE):
        builder = module.InterpreterBuilder
        monkeypatch.setattr(builder, "cast_impl", builder.cast_impl)
    triton_interpreter.round_in_interpreter()


@pytest.mark.parametrize("like", sorted(like for like, _ in OWN if like != "gemm"))
def test_own_functions_hold(like: str, rounds: None) -> None:
    """Some cases. For `gemm` see "A GEMM of oneDNN" in docs/server-bugs.md."""
    cases = cases_of(like, 0)
    step = max(len(cases) // 6, 1)
    functions = {"own": library_runs.functions_of("diptych")[like]}
    assert run_functions(LIKES[like], functions, 1, cases[::step])["own"][1:] == (0, [])


def test_wrong_functions_give_alarms() -> None:
    """Also with all arguments of a call in one memory."""
    right, kept = RIGHT["add_rms_norm", "flashinfer"], list[torch.Tensor]()
    silu = RIGHT["silu_and_mul", "torch"]

    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(silu(x))  # type: ignore[call-arg]
        return kept[-2] if len(kept) % 2 == 0 else kept[-1]

    def writes(x: torch.Tensor) -> torch.Tensor:
        return silu(x.mul_(0.5))  # type: ignore[call-arg]

    def writes_more(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        right(x, residual, weight, eps=eps)  # type: ignore[call-arg]
        weight[0] = 3.0

    for like, form, function, words in (
        ("silu_and_mul", "torch", keeps, "earlier call"),
        ("silu_and_mul", "torch", writes, "an input is modified: argument 0"),
        ("add_rms_norm", "flashinfer", writes_more, "an input is modified: argument 2"),
        ("rope", "torch", lambda q, k, *_: (q.clone(), k.clone()), "beyond"),
    ):
        alarms = library_runs.run_function(LIKES[like], form, function, 0)[2]
        assert alarms, like
        assert words in " ".join(alarms)
    assert library_runs.run_function(LIKES["add_rms_norm"], "flashinfer", right, 0)[1:] == (0, [])


def test_runs_of_libraries_count_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: None
) -> None:
    """The plumbing of `library_runs`, which is for a GPU, with the functions of a CPU."""
    file = tmp_path / "runs.json"
    for seeds in ("1", "2"):
        monkeypatch.setattr("sys.argv", ["", "--seeds", seeds, "--json", str(file), "--like", "silu_and_mul"])
        library_runs.main()
    rows = json.loads(file.read_text(encoding="utf-8"))
    num_cases = 2 * len(LIKES["silu_and_mul"].cases)
    for name in ("torch silu_and_mul", "diptych silu_and_mul"):
        assert rows[name] == {"seeds": 2, "checks": num_cases, "refused": 0, "alarms": []}


def test_errors_end_one_task_only(tmp_path: Path) -> None:
    """An error of a task is an alarm of its names; of one that has ended its process, too."""

    def fails(seed: int, names: list[str]) -> dict[str, Alarms]:
        raise RuntimeError("no memory")

    def ends(seed: int, names: list[str]) -> dict[str, Alarms]:
        raise Ends(names[0], [f"seed {seed}: illegal memory access"])

    def holds(seed: int, names: list[str]) -> dict[str, Alarms]:
        return dict.fromkeys(names, (1, 0, []))

    file = tmp_path / "runs.json"
    rows = run_seeds({"a": Task(["a"], fails), "b": Task(["b"], holds)}, 3, file, 1)
    assert rows["a"]["alarms"] == ["seed 0 ended: RuntimeError: no memory"]
    assert rows["b"]["seeds"] == 3
    with pytest.raises(Ends):
        run_seeds({"c": Task(["c"], ends)}, 3, file, 1)
    assert Record(file).rows["c"]["alarms"] == ["seed 0: illegal memory access"]


def test_a_stop_leaves_rows_without_gaps(tmp_path: Path) -> None:
    """Seeds may end in another order; a row has those before the first that has not ended."""
    record = Record(tmp_path / "runs.json")
    record.add("f", 1, (3, 1, ["seed 1"]))
    record.write()
    assert Record(record.path).rows["f"]["seeds"] == 0
    record.add("f", 0, (3, 0, []))
    record.write()
    assert Record(record.path).rows == {"f": {"seeds": 2, "checks": 6, "refused": 1, "alarms": ["seed 1"]}}
    assert Record(record.path).next_seed("f") == 2


def test_only_missing_seeds_run_and_tasks_end_together(tmp_path: Path) -> None:
    calls: list[tuple[str, int, list[str]]] = []

    def task(name: str, seconds: float) -> Task:
        def run(seed: int, names: list[str]) -> dict[str, Alarms]:
            calls.append((name, seed, names))
            time.sleep(seconds)
            return dict.fromkeys(names, (1, 0, []))

        return Task([name, f"other {name}"], run)

    record = Record(tmp_path / "runs.json")
    for name, seeds in (("slow", 7), ("other slow", 8), ("quick", 7), ("other quick", 7)):
        record.rows[name] = {"seeds": seeds, "checks": seeds, "refused": 0, "alarms": []}
    record.write()
    tasks = {name: task(name, seconds) for name, seconds in (("slow", 0.5), ("quick", 0.0))}
    rows = run_seeds(tasks, 12, record.path, 1)
    assert {row["seeds"] for row in rows.values()} == {12}
    assert calls[0] == ("slow", 7, ["slow"])
    # The first seed of each shows what it takes; then the slow one has more to do.
    assert [name for name, *_ in calls] == ["slow", "quick"] + ["slow"] * 4 + ["quick"] * 4


def test_runs_of_right_functions_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.json"
    for seeds in ("1", "2"):
        monkeypatch.setattr("sys.argv", ["", "--seeds", seeds, "--json", str(file), "--like", "gemm"])
        honest_runs.main()
    num_cases = 2 * 2 * len(LIKES["gemm"].cases)
    row = {"seeds": 2, "checks": num_cases, "refused": 0, "alarms": [], "functions": ["plain", "torch"]}
    assert json.loads(file.read_text(encoding="utf-8")) == {"gemm": row}


def test_an_error_that_names_what_is_not_supported_refuses() -> None:
    def norm(*_: object) -> None:
        raise RuntimeError("Unsupported head dimension: 80")

    checks, refused, alarms = library_runs.run_function(LIKES["rms_norm"], "torch", norm, 0)
    assert checks == refused
    assert alarms == []
