"""FlashInfer Trace, KernelBench and GPU MODE: right kernels hold, wrong ones are named, files are checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.formats import trace_check, trace_export
from diptych.shared.tools.conformance.formats.tasks import read_task
from diptych.shared.tools.conformance.formats.trace_check import check_solution
from diptych.shared.tools.conformance.formats.trace_files import (
    Definition,
    Solution,
    read_definition,
    read_solution,
    read_workloads,
)
from diptych.shared.tools.conformance.formats.trace_functions import (
    check_style,
    inputs_of,
    is_dps,
    reference_of,
)
from diptych.shared.tools.conformance.formats.trace_smaller import smaller
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.run import check_kernel
from tests.kernel_check.test_check_kernel import diptych
from tests.kernel_check.trace_data import DEFINITIONS, UNKNOWN, solution
from tests.planted import Bug, Bugs


def written(folder: Path, name: str, data: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def reports_of(folder: Path, name: str, data: dict[str, Any]) -> list[Report]:
    definition = read_definition(written(folder, "definition.json", DEFINITIONS[name]))
    return check_solution(definition, read_solution(written(folder, "solution.json", data)))


@pytest.mark.full
@pytest.mark.parametrize("is_dps", [True, False])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_references_and_right_solutions_hold(name: str, is_dps: bool, tmp_path: Path) -> None:
    reports = reports_of(tmp_path, name, solution(name, is_dps=is_dps))
    is_known = name not in UNKNOWN
    assert len(reports) == (2 if is_known else 1)
    for report in reports:
        assert report.status == 0, [(each.case, each.failure) for each in report.failing]
    assert any("properties only" in each for each in reports[-1].notes) == (not is_known)


PUBLISHED = {
    "gemm": {"N": 4096, "K": 4096},
    "gqa_paged": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "gqa_ragged": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "mla_paged": {"num_qo_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 1},
}
"""type -> constant axes of a Definition that is published"""


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_references_of_published_sizes_hold(name: str, tmp_path: Path) -> None:
    data = DEFINITIONS[name]
    sizes = {axis: {"type": "const", "value": size} for axis, size in PUBLISHED[name].items()}
    definition = read_definition(written(tmp_path, "d.json", {**data, "axes": {**data["axes"], **sizes}}))
    (report,) = check_solution(definition, None)
    assert report.status == 0, [(each.case, each.failure) for each in report.failing]


WRONG = Bugs("trace", finder="check kernel")
for _name, (_words, _says) in {
    "gemm": (("A.float()", "A.float().round()"), ""),
    "rmsnorm": (("1e-6", "1e-5"), ""),
    "gqa_paged": (("/ math.log(2)", "/ 1"), ""),
    "gqa_ragged": (("(d - c) - (b - a)", "0"), "aligned top-left"),
    "mla_paged": (("+ q_pe[i].float() @ kpe.T", ""), ""),
    "rope": (("a * c - b * s", "a * c + b * s"), ""),
    "sampling": (("< top_k[:, None]", "<= top_k[:, None]"), "one token too many"),
    "gdn": (("* beta[..., None]", ""), "beta is forgotten"),
    "gdn that normalises": (("F.normalize(x.float()[:, 0], dim=-1)", "x.float()[:, 0] * 1.05"), ""),
    "gdn_prefill": (("new[i] *= g[t, :, None, None]", "pass"), "does not decay"),
    "dsa_paged": (("row[row != -1]", "row.clamp(min=0)"), ""),
    "dsa_indexer": ((".T).relu()", ".T)"), "relu is forgotten"),
    "choice of scores": ((">= seq_lens", "> seq_lens"), ""),
    "moe": (("/ weights.sum(1, keepdim=True)", ""), "not normalised"),
    "draft": (("/ math.log(2)", ""), ""),
    "last page": (("+ int(kv_last_page_len[i])", "+ size"), "read to its end"),
    "latent prefill": (("+ length - new", ""), "aligned top-left"),
    "latent heads": (("hidden[:, None]", "hidden[:, None] & False"), "see later tokens"),
    "state left out": (("k.new_zeros(", "k.new_ones("), ""),
    "drafted tokens": (("initial_state[initial_state_indices.long()]", "initial_state[: len(q)]"), ""),
    "filters in order": (("ordered = ordered / ordered.sum(-1, keepdim=True)", ""), "applied to all tokens"),
    "top-p alone": (("< top_p[:, None]", "<= 1"), "top-p is ignored"),
    "softmax experts": (("best.values.softmax(-1)", "routing_logits.float().softmax(-1).topk(2, -1).values"),
                        "not normalised"),
    "experts of FP4": (("up, gate = (", "gate, up = ("), "first half of gemm1"),
    "given experts of FP4": (("else w * found", "else found"), "weights of experts are ignored"),
    "one given expert of FP4": (("x * w if best.shape[1] == 1 else x", "x"), ""),
    "one expert of FP8": (("x * w if best.shape[1] == 1 else x", "x"), "weights of experts are ignored"),
    "experts of FP8": (("gate * output1_scales_gate_scalar[e]", "gate * output1_scales_scalar[e]"), ""),
    "experts in another order": (("F.silu(gate) * up", "F.silu(up) * gate"), ""),
    "pool of states": (("(0.5 ** power)", "0.25"), ""),
    "added norm": (("+ residual.float()", ""), ""),
}.items():  # fmt: skip
    WRONG.add(_name, _words, where=_name, says=_says)


def found_by_name(bug: Bug, folder: Path) -> dict[str, str]:
    report = reports_of(folder, bug.name, solution(bug.name, bug.plant))[-1]
    return {"check kernel": "; ".join(report.names)} if report.status == 1 else {}


@WRONG.found_by(is_fast=lambda *_: False)
def test_wrong_solutions_fail(bug: Bug, tmp_path: Path) -> dict[str, str]:
    return found_by_name(bug, tmp_path)


def test_every_definition_has_a_wrong_solution() -> None:
    assert set(WRONG) == set(DEFINITIONS)


@pytest.mark.full
def test_the_reference_is_judged_first(tmp_path: Path) -> None:
    data = {**DEFINITIONS["gemm"], "reference": "def run(A, B):\n    return A @ B.T.round()\n"}
    definition = written(tmp_path, "definition.json", data)
    right = written(tmp_path, "solution.json", solution("gemm"))
    result = diptych("check", "kernel", str(right), "--definition", str(definition), "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "the Definition's own reference: 5 of 5 cases fail" in result.stdout
    assert "all 5 cases hold" in result.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reference": "x = 1"}, "no function run"),
        ({"reference": "def run(:"}, "no Python"),
        ({"axes": {"M": {"type": "var"}}}, "axis 'K'"),
        ({"inputs": {"A": {"shape": ["M", "K"], "dtype": "float12"}}}, "dtype of A is 'float12'"),
        ({"outputs": {"A": {"shape": ["M"], "dtype": "float32"}}}, "A is an input and an output"),
        ({"inputs": None}, "is missing or wrong"),
    ],
)
def test_wrong_definitions_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, "definition.json", {**DEFINITIONS["gemm"], **change})
    with pytest.raises(ValueError, match=words):
        read_definition(path)


def test_wrong_solutions_and_workloads_are_refused(tmp_path: Path) -> None:
    data = solution("gemm")
    for key, value, words in (
        ("language", "cuda", "only python, triton"),
        ("entry_point", "other.py::run", "names no file"),
    ):
        path = written(tmp_path, "solution.json", {**data, "spec": {**data["spec"], key: value}})
        with pytest.raises(ValueError, match=words):
            read_solution(path)
    path = written(tmp_path, "solution.json", {**data, "sources": [{"path": "../main.py", "content": ""}]})
    with pytest.raises(ValueError, match=r"names no file|outside"):
        read_solution(path)
    definition = read_definition(written(tmp_path, "definition.json", DEFINITIONS["gemm"]))
    (tmp_path / "w.jsonl").write_text('{"definition": "another", "workload": {}}\n')
    with pytest.raises(ValueError, match="no Workload"):
        read_workloads(tmp_path / "w.jsonl", definition)


def test_a_function_is_checked_as_a_solution(tmp_path: Path) -> None:
    """With optional parameters, beside other files; what does not fit is said before anything runs."""
    path = written(tmp_path, "d.json", DEFINITIONS["gemm"])
    (tmp_path / "beside.py").write_text("def product(a, b): return a @ b.T\n")
    (tmp_path / "g.py").write_text("from beside import product\ndef g(A, B, k=1): return product(A, B)\n")
    (tmp_path / "old.py").write_bytes("# \u00e9".encode("latin-1"))
    right = diptych("check", "kernel", f"{tmp_path}/g.py:g", "--definition", str(path))
    assert "all 5 cases hold" in right.stdout
    wrong = written(tmp_path, "s.json", solution("gemm", is_dps=False))
    data = json.loads(wrong.read_text())
    data["spec"]["destination_passing_style"] = True
    wrong.write_text(json.dumps(data))
    for words, says in (
        ((f"{tmp_path}/g.py:h", "--definition", str(path)), "has no function 'h'"),
        ((f"{tmp_path}/no.py:g", "--definition", str(path)), "no such file"),
        ((f"{tmp_path}/old.py:g", "--definition", str(path)), "old.py is no .py file in UTF-8"),
        ((str(wrong), "--definition", str(path)), "Write false for a function that returns its results"),
        ((f"{tmp_path}/g.py", "--definition", str(path)), "or a Solution, a .json file"),
        ((str(wrong),), "--definition DEF.json"),
    ):
        assert says in diptych("check", "kernel", *words).output


def test_a_reference_that_nothing_is_compared_with_is_refused(tmp_path: Path) -> None:
    data = {**DEFINITIONS["gemm"], "op_type": "convolution"}
    definition = read_definition(written(tmp_path, "definition.json", data))
    with pytest.raises(ValueError, match="name a Solution"):
        check_solution(definition, None)


def test_a_reference_that_needs_too_much_memory_is_not_judged(tmp_path: Path) -> None:
    large = DEFINITIONS["gemm"]["reference"].replace("return", "torch.ones(2**44)\n    return")
    data = {**DEFINITIONS["gemm"], "reference": f"import torch\n{large}"}
    definition = read_definition(written(tmp_path, "definition.json", data))
    right = read_solution(written(tmp_path, "solution.json", solution("gemm")))
    reference, report = check_solution(definition, right, seed=1)
    assert reference.status == 2
    assert "MemoryError: it needs more than" in str(reference.verdicts[0].refusal)
    assert report.status == 0
    assert "reference is not judged" in report.notes[0]


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {name: {"type": "const", "value": 2**15} for name in ("N", "K")}
    data = {**DEFINITIONS["gemm"], "axes": {**DEFINITIONS["gemm"]["axes"], **axes}}
    definition = read_definition(written(tmp_path, "definition.json", data))
    size = definition.num_const_bytes
    assert size == 2**31
    monkeypatch.setattr(trace_check, "free_memory", lambda: 3 * size)
    assert "GiB, which need" in trace_check.memory_of_cases(definition)
    monkeypatch.setattr(trace_check, "free_memory", lambda: 2 * size)
    with pytest.raises(ValueError, match=r"A check needs \d+\.\d GiB of memory, of which"):
        trace_check.memory_of_cases(definition)


def large_experts(folder: Path, old: str = "", new: str = "") -> Definition:
    """Experts of 6 times 1024 x 512, whose reference has sizes as numbers, with some words replaced."""
    data = DEFINITIONS["experts of FP4"]
    sizes = {"hidden_size": 1024, "intermediate_size": 512, "gemm1_out_size": 1024}
    axes = {name: {"type": "const", "value": size} for name, size in sizes.items()}
    reference = data["reference"].replace(").chunk(2)", ").split(512)").replace(old, new)
    reference = reference.replace("gemm2_weights.shape[1]", "1024")
    return read_definition(
        written(folder, "d.json", {**data, "axes": {**data["axes"], **axes}, "reference": reference})
    )


def test_a_smaller_definition_has_other_numbers(tmp_path: Path) -> None:
    large = large_experts(tmp_path)
    small = smaller(large)
    assert small is not None
    sizes = "hidden_size", "intermediate_size", "gemm1_out_size", "num_experts"
    assert [small.const[name] for name in sizes] == [512, 256, 512, 6]
    assert "split(256)" in small.reference
    assert "zeros(len(hidden_states), 512," in small.reference
    assert smaller(small) is None  # it is small
    assert smaller(replace(large, axes={**large.axes, "num_experts": 512})) is None  # whose number is it?


@pytest.mark.full
def test_a_reference_with_large_inputs_is_judged_with_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_check, "LARGE_INPUTS", 2**20)
    (right,) = check_solution(large_experts(tmp_path), None, seed=1)
    assert right.status == 0
    assert "hidden_size 512 instead of 1024" in right.notes[0]
    (wrong,) = check_solution(large_experts(tmp_path, "F.silu(gate) * up", "F.silu(up) * gate"), None, seed=1)
    assert "silu is applied to the first half of gemm1" in wrong.names
    assert not wrong.notes  # of its own sizes
    monkeypatch.setattr(trace_check, "free_memory", lambda: 1)
    (wrong,) = check_solution(large_experts(tmp_path, "F.silu(gate) * up", "F.silu(up) * gate"), None, seed=1)
    assert wrong.status == 1
    assert "512 instead of" in wrong.notes[0]
    assert "Its own sizes are not tried" in wrong.notes[1]


@pytest.mark.full
def test_an_exported_data_set_can_be_read_and_has_nan_in_dead_slots(tmp_path: Path) -> None:
    lines = list(trace_export.export(tmp_path, ["gqa_paged", "rmsnorm"], 0))
    assert "4 traces passed" in lines[0]
    definition = read_definition(next((tmp_path / "definitions" / "gqa_paged").glob("*.json")))
    workloads = read_workloads(next((tmp_path / "workloads" / "gqa_paged").glob("*.jsonl")), definition)
    keys = workloads[1].values["k_cache"]
    live = workloads[1].values["kv_indices"].long()
    assert bool(torch.isnan(keys).any())
    assert not torch.isnan(keys[live]).any()
    for path in tmp_path.rglob("solutions/*/*/*/*.json"):
        assert read_solution(path).definition in (definition.name, "rmsnorm_h96")
    (trace,) = (tmp_path / "traces" / "diptych" / "rmsnorm").glob("*.jsonl")
    evaluation = json.loads(trace.read_text().splitlines()[0])["evaluation"]
    assert set(evaluation) == {"status", "log", "timestamp", "environment", "correctness", "performance"}


GPU_MODE = {
    "task.yml": "tests:\n  - {rows: 3, columns: 65, seed: 1}\n  - {rows: 17, columns: 128, seed: 2}\n",
    "reference.py": "import torch\n\ndef generate_input(rows, columns, seed):\n"
    "    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))\n\n"
    "def ref_kernel(data):\n    return data.softmax(-1)\n",
    "right.py": "def custom_kernel(data):\n    return data.softmax(-1)\n",
    "zeros.py": "def custom_kernel(data):\n    y = data.softmax(-1)\n    return y * (y > 0.01)\n",
}
KERNEL_BENCH = """
import torch

class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layer = torch.nn.Linear(n, n)

    def forward(self, x):
        return torch.relu(self.layer(x))

def get_inputs():
    return [torch.randn(16, 64)]

def get_init_inputs():
    return [64]

class ModelNew(Model):
    pass

class Other(Model):
    def forward(self, x):
        return torch.relu(self.layer(x.half()) if x.is_cuda else self.layer(x) * 1.01)
"""

SQUARES = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x.square()

def get_inputs():
    return [torch.randn(16, 64)]

def get_init_inputs():
    return []

class Zeros(Model):
    def forward(self, x):
        y = super().forward(x)
        return y * (y > 0.005)
"""
"""The largest error of bfloat16 is more than what `Zeros` leaves out."""


def names_of(path: Path, submission: str) -> list[str] | None:
    """None: all cases hold."""
    task = read_task(path, submission)
    with ChildFunction(task.target, folder=task.folder) as function:
        report = check_kernel(function, "f", task.like, task.convention)
    return report.names if report.status else None


@pytest.mark.full
def test_tasks_of_gpu_mode(tmp_path: Path) -> None:
    for name, text in GPU_MODE.items():
        (tmp_path / name).write_text(text)
    assert names_of(tmp_path, str(tmp_path / "right.py")) is None
    assert names_of(tmp_path, str(tmp_path / "zeros.py")) == ["small results are replaced by zero"]


@pytest.mark.full
def test_tasks_of_kernel_bench(tmp_path: Path) -> None:
    path = tmp_path / "task_model.py"
    path.write_text(KERNEL_BENCH)
    assert names_of(path, str(path)) is None
    assert names_of(path, f"{path}:Other") is not None
    path.write_text(SQUARES)
    assert names_of(path, f"{path}:Model") is None
    assert names_of(path, f"{path}:Zeros") == ["small results are replaced by zero"]


def test_tasks_that_lack_something_are_refused(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("class Model: pass\n")
    with pytest.raises(ValueError, match="has no get_inputs"):
        read_task(tmp_path / "task.py", str(tmp_path / "task.py"))
    with pytest.raises(ValueError, match=r"no task\.yml with tests"):
        read_task(tmp_path, str(tmp_path / "task.py"))
    with pytest.raises(ValueError, match="no such file"):
        read_task(tmp_path, "none.py")


def test_inputs_are_passed_by_name_or_in_order(tmp_path: Path) -> None:
    draft, other, plain = (
        read_definition(written(tmp_path, "d.json", DEFINITIONS[name]))
        for name in ("draft", "experts in another order", "gemm")
    )
    assert "last_page_len" in draft.inputs
    assert "last_page_len" not in inputs_of(draft, reference_of(draft))
    assert inputs_of(other, reference_of(other))[1] == "routing_bias" != list(other.inputs)[1]
    said, unsaid = (
        Solution("f", plain.name, {"f.py": f"def f({names}): pass"}, "f.py", "f", None)
        for names in ("x, y", "A, B, C")
    )
    assert inputs_of(plain, said) == ("A", "B")
    assert (is_dps(plain, said), is_dps(plain, unsaid)) == (False, True)
    check_style(plain, replace(said, sources={"f.py": "from impl import *"}))
