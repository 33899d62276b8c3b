"""Two backends as one, the default among backends, and how the registry names them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.attention import default
from diptych.optimized.attention.default import DefaultAttention
from diptych.optimized.attention.hybrid import HybridAttention, hybrid_of
from diptych.reference.attention import TorchAttention
from diptych.shared import registry
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.clause import clauses_in
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from diptych.shared.tools.conformance.contracts.attention import outputs as attention_outputs
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionBatch, AttentionCase
from diptych.shared.tools.conformance.oracles.replanned_attention import _replanned
from diptych.shared.types import ForwardBatch, ForwardMode

DECODE = AttentionCase("decode", ((4, 1), (9, 1)))
EXTEND = AttentionCase("extend", ((4, 3), (0, 9)))
MIXED = AttentionCase("mixed", ((4, 1), (0, 9), (7, 1), (2, 1), (30, 1)))
VERIFY = AttentionCase("verify", ((4, 3), (2, 3)), mask="tree")


class Recording(TorchAttention):
    """Notes which batches it plans."""

    supports_cuda_graph = False

    def __init__(self, *pools: Any) -> None:
        super().__init__(*pools)
        self.planned: list[ForwardBatch] = []

    def plan(self, forward_batch: ForwardBatch) -> Any:
        self.planned.append(forward_batch)
        return super().plan(forward_batch)


class Capturable(_replanned(Recording)):  # type: ignore[misc]
    pass


@pytest.fixture
def _two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"first": f"{__name__}:Recording", "second": f"{__name__}:Capturable"}
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "attention", registry.IMPLEMENTATIONS["attention"] | names)


def made(batch: AttentionBatch, choice: str) -> HybridAttention:
    backend = registry.load("attention", choice)(batch.req_to_token_pool, batch.kv_pool)
    assert isinstance(backend, HybridAttention)
    return backend


@pytest.mark.usefixtures("_two_backends")
@pytest.mark.parametrize(
    ("case", "num_prompts", "num_others"),
    [(DECODE, 0, 2), (EXTEND, 2, 0), (MIXED, 2, 3), (VERIFY, 0, 2)],
    ids=lambda x: str(x)[:30],
)
def test_prompts_go_to_the_first_and_the_rest_to_the_second(
    case: AttentionCase, num_prompts: int, num_others: int
) -> None:
    batch = AttentionBatch(case)
    backend = made(batch, "first+second")
    batch.expect(batch.run_planned(backend, backend.plan(batch.forward_batch)))
    assert [b.batch_size for b in backend.prefill_backend.planned] == [num_prompts] * (num_prompts > 0)
    assert [b.batch_size for b in backend.decode_backend.planned] == [num_others] * (num_others > 0)


@pytest.mark.usefixtures("_two_backends")
def test_of_a_mixed_batch_the_second_sees_decoding() -> None:
    batch = AttentionBatch(MIXED)
    backend = made(batch, "first+second")
    backend.plan(batch.forward_batch)
    [prompts], [decoding] = backend.prefill_backend.planned, backend.decode_backend.planned
    assert (prompts.forward_mode, decoding.forward_mode) == (ForwardMode.EXTEND, ForwardMode.DECODE)
    assert decoding.extend_start_loc.tolist() == [0, 1, 2]
    assert decoding.seq_lens.tolist() == list(decoding.seq_lens_cpu) == [8, 3, 31]
    assert decoding.req_pool_indices.tolist() == batch.forward_batch.req_pool_indices[2:].tolist()


@pytest.mark.usefixtures("_two_backends")
def test_a_mixed_batch_without_prompts_decodes() -> None:
    batch = AttentionBatch(DECODE)
    batch.forward_batch = replace(batch.forward_batch, forward_mode=ForwardMode.MIXED)
    backend = made(batch, "first+second")
    batch.expect(batch.run_planned(backend, backend.plan(batch.forward_batch)))
    assert backend.prefill_backend.planned == []


def test_one_backend_gets_a_mixed_batch_whole() -> None:
    batch = AttentionBatch(MIXED)
    plan = made(batch, "reference+reference").plan(batch.forward_batch)
    assert [part.num_tokens for part in plan.parts] == [13]


def test_a_pair_holds_the_contract() -> None:
    pair = hybrid_of("reference", "reference")
    clauses = [clause for clause in clauses_of("attention") if clause.name not in ("extend", "head-dims")]
    verdicts = check_implementation(clauses, pair, TorchAttention, shrink_failures=False)
    assert [(v.clause.name, v.case.name) for v in verdicts if not v.holds] == []


@pytest.mark.usefixtures("_two_backends")
def test_two_backends_hold_the_clauses_on_outputs() -> None:
    verdicts = check_implementation(
        clauses_in(attention_outputs),
        registry.load("attention", "first+second"),
        TorchAttention,
        shrink_failures=False,
    )
    assert [(v.clause.name, v.case.name, v.failure) for v in verdicts if not v.holds] == []


@pytest.mark.usefixtures("_two_backends")
@pytest.mark.parametrize("given", [False, True])
def test_both_parts_of_a_mixed_batch_write_to_one_output(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, outs = AttentionBatch(MIXED), []
    backend = made(batch, "first+second")
    for part in (backend.prefill_backend, backend.decode_backend):

        def noted(*args: Any, run: Any = part.run, **options: Any) -> torch.Tensor:
            outs.append(options["out"])
            return run(*args, **options)

        monkeypatch.setattr(part, "run", noted)
    out = torch.empty_like(batch.q) if given else None
    output = batch.run_planned(backend, backend.plan(batch.forward_batch), out=out)
    batch.expect(output)
    assert output is out or not given
    assert [len(part) for part in outs] == [10, 3]
    assert [part.data_ptr() for part in outs] == [output.data_ptr(), output[10].data_ptr()]


@pytest.mark.usefixtures("_two_backends")
def test_graphs_are_the_second_ones() -> None:
    batch = AttentionBatch(DECODE)
    backend = made(batch, "first+second")
    assert backend.supports_cuda_graph
    assert not made(batch, "second+first").supports_cuda_graph
    plan = backend.plan_for_graph(batch.forward_batch, max_seq_len=32)
    batch.req_to_token_pool.req_to_token[batch.rows] = batch.req_to_token_pool.req_to_token[batch.rows[::-1]]
    shorter = replace(batch.forward_batch, seq_lens_cpu=(5, 5))
    shorter.seq_lens.fill_(5)
    backend.replan(plan, shorter)
    batch.forward_batch = shorter
    assert torch.equal(batch.run_planned(backend, plan), batch.run(TorchAttention))
    with pytest.raises(ValueError, match="does not run in CUDA graphs"):
        made(batch, "second+first").plan_for_graph(batch.forward_batch, 32)


def test_one_name_twice_is_one_backend() -> None:
    batch = AttentionBatch(DECODE)
    backend = made(batch, "reference+reference")
    assert backend.prefill_backend is backend.decode_backend


# ---- names ----


@pytest.mark.parametrize("choice", ["fa3+", "+triton", "fa3+nonsense", "fa3+triton+triton", "fa3 + triton"])
def test_a_pair_of_anything_else_is_refused(choice: str) -> None:
    with pytest.raises(ValueError, match="two of them as prefill"):
        registry.check_choice("attention", choice)


def test_other_components_have_no_pairs() -> None:
    with pytest.raises(ValueError, match=r"choose one of reference") as refusal:
        registry.check_choice("sampler", "reference+reference")
    assert "prefill" not in str(refusal.value)


@pytest.mark.parametrize("choice", ["flashinfer", "fa3", "fa3+triton", "triton+flashinfer", "reference+fa3"])
def test_what_needs_a_gpu_says_so(choice: str) -> None:
    registry.check_choice("attention", choice)
    registry.check_device({"attention": choice}, "cuda:1")
    with pytest.raises(ValueError, match="needs a CUDA GPU, and the device is cpu"):
        registry.check_device({"attention": choice}, "cpu")


@pytest.mark.parametrize(
    "choice", ["reference", "triton", "optimized", "triton+reference", "my.module:Class"]
)
def test_the_others_run_anywhere(choice: str) -> None:
    registry.check_device({"attention": choice, "sampler": "reference"}, "cpu")


@pytest.mark.parametrize(
    ("component", "choice"),
    [
        ("attention", "triton"),
        ("attention", "triton+reference"),
        ("sampler", "optimized"),
        ("moe", "optimized"),
    ],
)
def test_what_triton_computes_needs_a_gpu_or_its_interpreter(
    monkeypatch: pytest.MonkeyPatch, component: str, choice: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(suite, "check_device", lambda: torch.device("cpu"))
    registry.check_device({component: choice}, "cuda")
    with pytest.raises(ValueError, match=f"{re.escape(choice)} needs a CUDA GPU .*TRITON_INTERPRET=1"):
        registry.check_device({component: choice}, "cpu")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):  # and not clause after clause that fails
        suite.check_component(component, choice)


# ---- the default ----


def test_without_a_gpu_it_is_triton() -> None:
    assert str(DefaultAttention.choose(torch.device("cpu"))).startswith("triton: ")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "fa3+triton"), ((8, 0), "flashinfer+triton"), ((10, 0), "flashinfer+triton")],
)
def test_by_architecture(monkeypatch: pytest.MonkeyPatch, capability: Any, expected: str) -> None:
    monkeypatch.setattr(default.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert str(DefaultAttention.choose(torch.device("cuda"))).startswith(f"{expected}: ")
    for pool in ((torch.float32, 128), (torch.bfloat16, 80)):
        assert str(DefaultAttention.choose(torch.device("cuda"), *pool)).startswith("triton: ")


@pytest.mark.parametrize("missing", ["flashinfer", "nvcc"])
def test_what_is_missing_is_the_reason(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(
        default.importlib.util, "find_spec", lambda name: None if missing == "flashinfer" else object()
    )
    monkeypatch.setattr(default, "can_compile", lambda: missing != "nvcc")
    choice = DefaultAttention.choose(torch.device("cuda"))
    assert (choice.prefill, choice.decode) == ("triton", "triton")
    assert missing in choice.reason.lower()


@pytest.mark.parametrize("found", ["", "nvcc on PATH", "nvcc in CUDA_HOME", "kernels"])
def test_what_flashinfer_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(default.shutil, "which", lambda name: found == "nvcc on PATH" or None)
    monkeypatch.setattr(default.importlib.util, "find_spec", lambda name: found == "kernels" or None)
    if found == "nvcc in CUDA_HOME":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    assert default.can_compile() == bool(found)


@pytest.fixture
def _two_chosen(_two_backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = default.Choice("first", "second", "")
    monkeypatch.setattr(DefaultAttention, "choose", staticmethod(lambda *pool: chosen))


@pytest.mark.usefixtures("_two_chosen")
@pytest.mark.parametrize(
    ("requests", "is_first"),
    [
        (((0, 64),), True),
        (((0, 63),), False),
        (((5, 1), (0, 127)), True),
        (((5, 1), (0, 126)), False),
        (((9, 1), (9, 1)), False),
    ],
)
def test_few_tokens_a_request_are_like_decoding(requests: Any, is_first: bool) -> None:
    batch = AttentionBatch(AttentionCase("", requests, head_dim=16))
    backend = made(batch, "optimized")
    batch.expect(batch.run_planned(backend, backend.plan(batch.forward_batch)))
    assert len(backend.prefill_backend.planned) == is_first
    assert len(backend.decode_backend.planned) == (not is_first)


@pytest.mark.usefixtures("_two_chosen")
def test_layers_with_sinks_go_to_the_backend_that_takes_all() -> None:
    batch = AttentionBatch(AttentionCase("", ((3, 70),), head_dim=16, sinks=(0.5, -1.0)))
    backend = made(batch, "optimized")
    batch.expect(batch.run_planned(backend, backend.plan(batch.forward_batch)))
    assert len(backend.decode_backend.planned) == 1
