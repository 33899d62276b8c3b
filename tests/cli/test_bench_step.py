"""`diptych bench step`: the batches it makes, the kernel table, the command and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench.ceilings import launch_times
from diptych.shared.tools.bench.kernel_table import IDLE, KernelTime, kernel_table, readable_name
from diptych.shared.tools.bench.step import engine_flags, step_of
from diptych.shared.tools.bench.step_inputs import StepCase, fill_pool, make_forward_batch, place_requests
from diptych.shared.tools.commands.bench_step import make_cases, shortened
from diptych.shared.types import ForwardMode, LoraAdapter


def engine(**flags: object) -> LLM:
    return LLM(**{"device": "cpu", "panel": "reference", "max_total_tokens": 1024, **flags})


# ---- what a step is made of ----


CASES = (StepCase("decode", 3, 40), StepCase("prefill", 3, 17, 50), StepCase("mixed", 3, 40, 50))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mode)
def test_a_batch_as_the_scheduler_makes_it(case: StepCase, page_size: int) -> None:
    llm = engine(page_size=page_size)
    pool, allocator = llm.assembly.parts.req_to_token_pool, llm.assembly.parts.allocator
    rows = place_requests(llm.assembly.parts, case)
    batch = make_forward_batch(llm.assembly.parts, case, rows)
    assert allocator.available_size() == 1024
    modes = {"decode": ForwardMode.DECODE, "prefill": ForwardMode.EXTEND, "mixed": ForwardMode.MIXED}
    assert batch.forward_mode is modes[case.mode]
    assert batch.num_tokens == (3 if case.mode == "decode" else 50)
    slots = [pool.read(row, 0, n) for row, n in zip(rows, case.seq_lens)]
    assert torch.cat(slots).unique().numel() == sum(case.seq_lens)
    assert min(s.min() for s in slots) >= page_size  # never the dummy page
    jumps = [int((s[page_size::page_size] - s[:-page_size:page_size]).unique().numel()) for s in slots]
    assert min(jumps) > 1, "pages follow each other as if nothing had ever been freed"
    for n in range(0, 40 - page_size, page_size):
        assert (slots[0][n : n + page_size].diff() == 1).all()
    start = 0
    for row, seq_len, new in zip(rows, case.seq_lens, case.extend_seq_lens):
        positions = batch.positions[start : start + new]
        assert positions.tolist() == list(range(seq_len - new, seq_len))
        assert torch.equal(batch.out_cache_loc[start : start + new], pool.read(row, seq_len - new, seq_len))
        start += new
    assert batch.last_token_rows.tolist()[-1] == batch.num_tokens - 1


def test_requests_of_a_step_take_the_adapters_in_turn() -> None:
    llm = engine(max_loras_per_batch=2)
    assert llm.assembly.lora is not None
    for name in ("law", "code", "one too many"):
        llm.assembly.lora.by_name[name] = LoraAdapter(name, name, {})
    with step_of(llm.assembly.parts, CASES[0], 0.6, 0, llm.assembly.lora) as step:
        step()
        requests = llm.assembly.lora.pool.requests  # type: ignore[attr-defined]
        assert [adapter.name for _, adapter in requests] == ["law", "code", "law"]


def test_steps_give_finite_logits_and_give_their_rows_back() -> None:
    llm = engine()
    fill_pool(llm.assembly.kv_pool)
    assert (llm.assembly.kv_pool.k_buffer(3) != 0).all()
    before = llm.assembly.parts.req_to_token_pool.available_size()
    with step_of(llm.assembly.parts, StepCase("decode", 2, 30), 0.6, 0) as step:
        logits, sampled = step()  # type: ignore[misc]
        assert torch.isfinite(logits.next_token_logits).all()
        assert (sampled.next_token_ids >= 0).all()
    assert llm.assembly.parts.req_to_token_pool.available_size() == before


def test_launches_are_timed_without_what_was_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(device: torch.device) -> None:
        nonlocal now
        now += 100.0

    def launch() -> None:
        nonlocal now
        now += 2.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert launch_times(launch, torch.device("cuda"), 3, lambda: now) == [2.0] * 3
    assert now == 306.0


def test_prefill_tokens_are_dealt_out_evenly() -> None:
    case = StepCase("prefill", 3, 10, 8)
    assert (case.extend_seq_lens, case.seq_lens) == ((3, 3, 2), (13, 13, 12))
    assert case.num_pool_tokens(4) == 16 + 16 + 12


def test_beside_those_that_decode_one_begins_its_prompt() -> None:
    case = StepCase("mixed", 3, 10, 8)
    assert (case.extend_seq_lens, case.seq_lens, case.num_requests) == ((5, 1, 1, 1), (5, 10, 10, 10), 4)
    flags = engine_flags("tiny-dense", make_cases("mixed", "3,5", "10", "8,20"), {}, 2048)
    assert (flags["max_running_requests"], flags["cuda_graph_bs"]) == (6, (1,))
    assert (flags["enable_mixed_chunk"], flags["chunked_prefill_size"]) == (True, 20)


def test_an_engine_gets_room_for_the_largest_case() -> None:
    cases = make_cases("decode", "2,8", "16,32", None)
    assert [(case.batch_size, case.context_len) for case in cases] == [(2, 16), (2, 32), (8, 16), (8, 32)]
    flags = engine_flags("Qwen3-8B", cases, {"panel": "reference"}, 40960)
    assert (flags["load_format"], flags["max_running_requests"], flags["panel"]) == ("dummy", 8, "reference")
    assert (flags["cuda_graph_bs"], flags["cuda_graph_max_tokens"]) == ((2, 8), 0)  # graphs of these alone
    prefill = engine_flags("Qwen3-8B", make_cases("prefill", "2", None, "64"), {}, 40960)
    assert prefill["cuda_graph_bs"] == (1,)
    assert "cuda_graph_max_tokens" not in prefill
    assert "load_format" not in engine_flags("tiny-dense", cases, {}, 2048)
    assert engine_flags("tiny-dense", cases, {"max_running_requests": 64}, 2048)["max_running_requests"] == 64
    with pytest.raises(ValueError, match="32 tokens exceeds its 31 positions"):
        engine_flags("tiny-dense", cases, {}, 31)


# ---- where the time goes ----


def test_kernels_and_idle_time_add_up_to_the_step() -> None:
    # Two steps: a [0, 4], b waits from 3 and ends at 6; nothing until a [10, 14], b [13, 16].
    spans = [("a", 10.0, 14.0), ("b", 3.0, 6.0), ("a", 0.0, 4.0), ("b", 13.0, 16.0)]
    rows = kernel_table(spans, 2)
    assert [row.name for row in rows] == ["a", "b", IDLE]
    assert [row.num_calls for row in rows[:2]] == [1, 1]
    assert [row.seconds * 1e6 for row in rows] == pytest.approx([4, 2, 2])
    assert kernel_table([], 2) == []


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("_skinny_linear", "_skinny_linear"),
        ("nvjet_tst_128x64_64x7_1x2_h_bz_TNT", "cuBLAS: nvjet_tst_128x64_64x7_1x2_h_bz_TNT"),
        ("void flashinfer::BatchDecode<64u, true, __nv_bfloat16>(Params)", "flashinfer::BatchDecode"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>)",
            "vectorized_elementwise_kernel: CUDAFunctor_add",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
    ],
)
def test_names_of_kernels_can_be_read(kernel: str, name: str) -> None:
    assert readable_name(kernel) == name


def test_a_long_table_is_cut_behind_the_longest() -> None:
    rows = [KernelTime(f"k{i}", 1, 10.0 - i) for i in range(5)] + [KernelTime(IDLE, 0, 1.0)]
    assert shortened(tuple(rows), 3) == [*rows[:3], KernelTime("2 others", 2, 13.0), rows[-1]]
    assert shortened(tuple(rows), 5) == rows


# ---- the command ----

OPTIONS = ("--device", "cpu", "--panel", "reference", "--max-total-tokens", "1024", "--repeats", "5")


def test_bench_step_measures_two_models(diptych: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    models = ("--model", "tiny-dense,tiny-moe", "--batch", "1,3", "--context", "20")
    result = diptych("bench", "step", *OPTIONS, *models, "--profile", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "no GPU" in result.stdout
    data = json.loads(file.read_text())
    assert data["ceilings"]["float32"]["bytes_per_s"] > 1e8
    assert data["versions"]["torch"]
    rows = data["results"]
    assert [(row["model"], row["batch_size"]) for row in rows] == [
        ("tiny-dense", 1), ("tiny-dense", 3), ("tiny-moe", 1), ("tiny-moe", 3),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["step_s"]["min"] <= row["step_s"]["median"] <= row["step_s"]["max"]
        assert row["step_s"]["num_repeats"] == 5
        assert row["share_of_bound"] == pytest.approx(row["bound_s"] / row["step_s"]["median"])
        assert row["components"]["attention"] == "reference"
        assert row["num_pool_tokens"] == 1024
        assert row["kernels"][-1]["name"] == IDLE
        assert row["kernels"][0]["seconds"] > 0
    assert rows[0]["num_experts_hit"] is None
    assert rows[2]["is_routing_counted"]
    assert rows[2]["num_experts_hit"] == 2  # one token, two experts
    assert 2 <= rows[3]["num_experts_hit"] <= 6


def test_bench_step_leaves_out_what_does_not_fit_beside_what_does(diptych: Callable[..., Result]) -> None:
    result = diptych("bench", "step", *OPTIONS, "--batch", "2,9", "--context", "200")
    assert result.exit_code == 0, result.output
    assert "left out, 1800 slots and the KV pool has 1024" in result.stderr


def test_bench_step_measures_a_prefill(diptych: Callable[..., Result]) -> None:
    options = ("--mode", "prefill", "--batch", "2", "--prefill-tokens", "12", "--context", "5")
    result = diptych("bench", "step", *OPTIONS, *options)
    assert result.exit_code == 0, result.output
    assert "TFLOP/s" in result.stdout


def test_bench_step_measures_a_mixed_step(diptych: Callable[..., Result]) -> None:
    options = ("--mode", "mixed", "--batch", "2", "--prefill-tokens", "12", "--context", "5")
    result = diptych("bench", "step", *OPTIONS, *options)
    assert result.exit_code == 0, result.output
    assert "TFLOP/s" in result.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--batch", "1;2"), "--batch takes numbers separated by ',', got '1;2'"),
        (("--batch", "0"), "batch must be at least 1, got 0"),
        (("--context", "0"), "context of a decode step must be at least 1, got 0"),
        (("--mode", "verify"), "--mode must be decode, prefill or mixed, got 'verify'"),
        (("--mode", "mixed", "--batch", "4", "--prefill-tokens", "4"), "leaves none for a prompt"),
        (("--mode", "prefill", "--batch", "4", "--prefill-tokens", "3"), "too few for 4 requests"),
        (("--context", "4096"), "a request of 4096 tokens exceeds its 2048 positions"),
        (("--batch", "9", "--context", "200"), "need 1800 slots; the KV pool has 1024"),
        (
            ("--batch", "9", "--context", "2", "--max-running-requests", "4"),
            "exceeds max_running_requests (4)",
        ),
        (
            ("--mode", "decode", "--prefill-tokens", "10"),
            "--prefill-tokens does not apply to a decode step, which has --batch, --context",
        ),
        (("--json", "no/such/folder/x.json"), "for x.json"),
        (("--json", "."), ". is a folder: name a file in it"),
        (("--model", ","), "--model names no model"),
        (("--dp", "2"), "dp=2, disaggregation=False: a step alone is measured with tp only"),
        (("--pp", "2"), "`diptych bench offline` and `bench latency` measure the whole engine"),
        (("--model", "no-such-model"), "no model 'no-such-model'"),
    ],
)
def test_bench_step_refuses_nonsense(
    diptych: Callable[..., Result], options: tuple[str, ...], complaint: str
) -> None:
    result = diptych("bench", "step", *OPTIONS, *options)
    assert result.exit_code == 2
    assert complaint in result.stderr.splitlines()[-1]
