"""`diptych check kernel`: right functions hold in every convention, planted bugs are found and named."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from diptych.shared.tools import cli
from diptych.shared.tools.bench import bare_kernel
from diptych.shared.tools.bench.step_cost import Ceilings
from diptych.shared.tools.conformance.kernels import run, triton_interpreter
from diptych.shared.tools.conformance.kernels.attention_suspects import dense
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.conventions import (
    CONVENTIONS,
    LIKES,
    convention_of,
    operation_of,
)
from diptych.shared.tools.conformance.kernels.kernel_report import Report, Verdict, line_of
from diptych.shared.tools.conformance.kernels.kernel_report_html import render
from diptych.shared.tools.conformance.kernels.target import load_function
from tests.kernel_check.right import RIGHT
from tests.kernel_check.wrong import WRONG, fails_at_times, never_returns, one_element_beyond
from tests.planted import Bug

EXAMPLE = str(Path(__file__).parents[2] / "docs" / "examples" / "my_kernels.py")
QUICK = {
    **{
        name: tuple(case for case in LIKES[name].cases if max(case.seq_lens) < 120)[:10]
        + LIKES[name].cases[-1:]
        for name in ("attention.decode", "attention.extend")
    },
    "sampler": tuple(case for case in LIKES["sampler"].cases if case.vocab_size < 100),
    "mla.decode": LIKES["mla.decode"].cases[2:4],
    "verify": LIKES["verify"].cases[:2],
}
"""The cases that take long are those of long sequences: `test_long_sequences_hold` has them."""
ALL = [(like, each.library) for like, conventions in CONVENTIONS.items() for each in conventions]
OF_ONE_PROCESS = [(like, library) for like, library in ALL if not LIKES[like].ranks]


TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, weight, out, n, eps, SIZE: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, SIZE)
    values = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values) / n + eps)
    tl.store(out + row * n + i, values * root * tl.load(weight + i, mask=i < n).to(tl.float32), mask=i < n)

def norm(x, shape, weight, eps):
    if not x.is_contiguous():
        raise ValueError("rows must be dense")
    out = torch.empty_like(x)
    kernel[(len(x),)](x, weight, out, x.shape[1], eps, triton.next_power_of_2(x.shape[1]))
    return out
"""


def check(like: str, library: str, function, cases=None) -> Report:  # type: ignore[no-untyped-def]
    return run.check_kernel(function, "f", LIKES[like], convention_of(like, library), cases)


@pytest.mark.parametrize(("like", "library"), OF_ONE_PROCESS)
def test_right_functions_hold(like: str, library: str) -> None:
    cases = QUICK.get(like, LIKES[like].cases)
    report = check(like, library, RIGHT[like, library], cases if library == "torch" else cases[:3])
    assert report.status == 0, [(each.case, each.failure) for each in report.failing]
    assert report.num_refused == 0
    assert report.names == []


@WRONG.found_by(is_fast=lambda number, _: number % 6 == 0)
def test_planted_bugs_are_found_and_named(bug: Bug) -> dict[str, str]:
    cases = LIKES[bug.where].more_cases["window"] if "window" in bug.name else QUICK.get(bug.where)
    report = check(bug.where, "torch", bug.plant, cases)
    return {"check kernel": "; ".join(report.names)} if report.status == 1 else {}


@pytest.mark.full
@pytest.mark.parametrize("like", QUICK)
def test_long_sequences_hold(like: str) -> None:
    report = check(like, "torch", RIGHT[like, "torch"])
    assert report.status == 0, [(each.case, each.failure) for each in report.failing]


@pytest.mark.parametrize("like", ["sampler", "verify"])
def test_sizes_of_few_draws_are_timed_without_false_alarms(like: str) -> None:
    cases = LIKES[like].timed("cpu")[:1]
    report = check(like, "torch", RIGHT[like, "torch"], cases)
    assert report.status == 0, report.failing
    assert "<svg" not in render(report)  # nothing that a plot of errors could show


def test_windows_hold() -> None:
    for library in ("torch", "flash-attn", "flashinfer", "triton"):
        report = check("attention.decode", library, RIGHT["attention.decode", library],
                       LIKES["attention.decode"].more_cases["window"])  # fmt: skip
        assert report.status == 0, report.failing


@pytest.mark.parametrize("like", ["attention.decode", "attention.extend"])
def test_the_formula_behind_the_mistakes_is_the_truth_of_the_contract(like: str) -> None:
    cases = (*LIKES[like].cases[:6], *LIKES[like].more_cases.get("window", ()))
    for case in cases:
        problem = LIKES[like].make(case, True)
        finite = problem.with_finite_memory()
        torch.testing.assert_close(dense(finite)["out"], problem.expected["out"])


def test_other_pages_hold_the_same_tokens() -> None:
    case = LIKES["attention.decode"].cases[0]
    problem = LIKES["attention.decode"].make(case, True)
    moved = problem.with_other_pages(("k", "v"))
    assert not torch.equal(moved["page_table"], problem["page_table"])
    for row, length in enumerate(problem["lens"].tolist()):
        a, b = (each["k"][each["page_table"][row].long()].flatten(0, 1)[:length] for each in (problem, moved))
        assert torch.equal(a, b)


def test_refusals_are_no_failures() -> None:
    def only_float32(x, shape, weight, eps):  # type: ignore[no-untyped-def]
        if x.dtype != torch.float32:
            raise ValueError("only float32 is supported")
        return RIGHT["rms_norm", "torch"](x, shape, weight, eps)

    def nothing(*args):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    report = check("rms_norm", "torch", only_float32)
    assert report.status == 0
    assert report.num_refused == len(LIKES["rms_norm"].cases) * 2 // 3
    assert check("rms_norm", "torch", nothing).status == 2


def test_writes_beside_an_output_are_found() -> None:
    report = check("silu_and_mul", "vllm", one_element_beyond, LIKES["silu_and_mul"].cases[:2])
    assert "memory before or after the output" in str(report.verdicts[0].failure)
    assert len(report.failing) == 2


def test_a_function_that_fails_at_times_is_no_mistake_of_strides() -> None:
    report = check("silu_and_mul", "torch", fails_at_times, LIKES["silu_and_mul"].cases[:2])
    assert "raised RuntimeError: the second call" in str(report.failing[0].failure)
    assert report.names == ["another call with the same inputs gives another result, or fails"]


def test_a_call_that_does_not_return_ends_the_check() -> None:
    report = run.check_kernel(
        never_returns, "f", LIKES["silu_and_mul"], convention_of("silu_and_mul", "torch"), seconds=0.05
    )
    assert report.failing[0].failure == "the call: expected a return within 0.05 s, got none"
    assert report.num_not_run == len(LIKES["silu_and_mul"].cases) - 1
    assert "more are not run" in report.summary


def test_a_case_for_which_no_time_is_left_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [Verdict("a", "", 1), Verdict("b", "", 1, failure="got none", ends_check=True)]
    left, clock = list(verdicts), iter((0.0, 0.0, 2.0))
    monkeypatch.setattr(run, "check_problem", lambda *_: left.pop(0))
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(run, "until", lambda ends_at: None)
    like = LIKES["silu_and_mul"]
    with ChildFunction("unused:f", ends_at=1.0) as child:
        report = run.check_kernel(child, "f", like, convention_of(like.name, "torch"))
    assert (report.verdicts, report.status) == (verdicts[:1], 2)
    assert report.summary == f"1 cases hold, {len(like.cases) - 1} are not run: the time of the check is over"


def test_what_depends_on_the_batch_is_reported() -> None:
    def with_batch(x):  # type: ignore[no-untyped-def]
        y = RIGHT["silu_and_mul", "torch"](x)
        return y * (1 + 2e-7) if len(x) > 1 and x.dtype == torch.float32 else y

    report = check("silu_and_mul", "torch", with_batch)
    assert report.status == 0
    values = [each.reports.get("a row alone gives the same bits") for each in report.verdicts]
    assert False in values
    assert True in values


# ---- the command ----


def diptych(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args), catch_exceptions=True)


def test_the_command_writes_page_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_kernel, "measure_ceilings", lambda *_: Ceilings(1e10, 1e11))
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    target = f"{EXAMPLE}:rms_norm"
    arguments = ("check", "kernel", target, "--like", "rms_norm", "--html", str(page), "--json", str(file))
    result = diptych(*arguments, "--seed", "1", "--case", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "--seed 1 repeats it" in result.stderr
    assert "times of a CPU" in result.stdout or torch.cuda.is_available()
    report = json.loads(file.read_text())
    assert (report["mistakes"], report["seed"]) == ([], 1)
    assert "mean" in report["operators"]
    assert all(each["seconds"] > 0 and each["bound"] > 0 and each["ours"] > 0 for each in report["timings"])
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_function_that_ends_when_it_is_watched_fails() -> None:
    target = "tests.kernel_check.conduct:exits_when_watched"
    result = diptych(
        "check", "kernel", target, "--like", "silu_and_mul", "--case", "1 x 64, float32", "--no-timing"
    )
    assert result.exit_code == 1, result.output
    assert "one more call: the function's process ended with exit code 3" in result.output


@pytest.mark.parametrize("name", ["attention.decode", "mla", "moe", "verify", "w8a8"])
def test_a_group_of_one_operation_is_a_name_of_it(name: str) -> None:
    assert operation_of(name) == {"mla": "mla.decode"}.get(name, name)


def test_the_command_names_what_is_wrong_with_the_call() -> None:
    for args, words in (
        ((f"{EXAMPLE}:rms_norm",), "--like"),
        ((f"{EXAMPLE}:rms_norm", "--like", "conv"), "attention.decode"),
        ((f"{EXAMPLE}:rms_norm", "--like", "attention"), "it can be attention.decode, attention.extend"),
        ((f"{EXAMPLE}:rms_norm", "--like", "rms_norm", "--convention", "jax"), "flashinfer"),
        ((f"{EXAMPLE}:rms_norm", "--like", "rms_norm", "--with", "window"), "none"),
        ((f"{EXAMPLE}:rms_norm", "--like", "rms_norm", "--case", "int3"), "int3"),
        ((f"{EXAMPLE}:rms_norm", "--like", "rms_norm", "--ranks", "2"), "--ranks does not apply"),
        ((f"{EXAMPLE}:rms_norm", "--like", "all_reduce", "--ranks", "1"), "--ranks"),
        ((f"{EXAMPLE}:silu_and_mul", "--like", "rms_norm"), "takes (x"),
        ((f"{EXAMPLE}:silu_and_mul", "--like", "gemm"), "Other conventions: --list --like gemm"),
        ((f"{EXAMPLE}:rms_norm", "--like", "rms_norm", "--convention", "flashinfer"), "--convention torch"),
    ):
        result = diptych("check", "kernel", *args)
        assert result.exit_code != 0
        assert words in result.output + str(result.exception)


@pytest.mark.parametrize(
    ("target", "words"),
    [(f"{EXAMPLE}:no_such", "no_such"), (f"{EXAMPLE}:torch", "not a function"), ("no.py:f", "no such file")],
)
def test_a_target_that_is_no_function_is_refused(target: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_function(target)


def test_a_file_imports_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_a_kernel.py").write_text("def f(x): return x\n")
    for line, words in (
        ("from beside_a_kernel import f", ""),
        ("from .beside_a_kernel import f", "named package.module:function"),
        ("import no_such_module", "with uvx: --with no_such_module"),
    ):
        (tmp_path / "kernel.py").write_text(line)
        if words:
            with pytest.raises(ValueError, match=words):
                load_function(f"{tmp_path}/kernel.py:f")
        else:
            assert load_function(f"{tmp_path}/kernel.py:f")(1) == 1


def test_the_interpreter_rounds_as_a_gpu() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, 0.0])))
    rounded = torch.from_numpy(triton_interpreter.nearest(x.numpy()).view("int16")).view(torch.bfloat16)
    torch.testing.assert_close(rounded, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.full
def test_a_kernel_runs_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, too; without the interpreter and a GPU, what to do is said."""
    pytest.importorskip("triton")
    (tmp_path / "norm.py").write_text(TRITON)
    words = f"{tmp_path}/norm.py:norm", "--like", "rms_norm", "--case", "21 x 128", "--no-timing"
    if not torch.cuda.is_available():
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert "TRITON_INTERPRET=1" in diptych("check", "kernel", *words).stdout
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = diptych("check", "kernel", *words)
    assert "all 3 cases hold" in result.stdout


def test_the_list_has_every_convention() -> None:
    result = diptych("check", "kernel", "--list")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert len(lines) < 24  # a screen
    assert all(library in lines[like] for like, library in ALL)
    assert "--convention flashinfer" in diptych("check", "kernel", "--list", "--like", "rope").stdout


def test_a_case_that_fails_is_on_the_page() -> None:
    wrong = WRONG["last token"]
    report = check(wrong.where, "torch", wrong.planted)
    page = render(report)
    assert "the last token is not seen" in page
    assert "cases fail" in page
    assert "--seed 0" in page


def test_a_code_scanner_is_shown_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Path(EXAMPLE).read_text().splitlines()
    assert lines[line_of(f"{EXAMPLE}:paged_decode") - 1].startswith("def paged_decode")
    assert [line_of(f"{EXAMPLE}:{name}") for name in ("missing", "")] == [1, 1]
    assert line_of("package.module:f") == 1
    monkeypatch.chdir(Path(EXAMPLE).parent)
    report = Report(LIKES["rope"], convention_of("rope", "torch"), f"{EXAMPLE}:rope", "CPU", [], [], [])
    report.verdicts = [Verdict("a case", "float32", 1, failure="wrong")]
    (run_of_tool,) = report.for_ci().sarif()["runs"]
    place = run_of_tool["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my_kernels.py"
    assert lines[place["region"]["startLine"] - 1].startswith("def rope")
