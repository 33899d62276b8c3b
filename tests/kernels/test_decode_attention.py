"""Decode attention beyond its contract: keys divided among CTAs, and steps that follow one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.optimized.attention.triton import TritonAttention
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_close
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.poison import poisoned_allocations
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionBatch, AttentionCase
from tests.conformance.mutants.optimized_attention import FEW_CTAS
from tests.kernels.fast_grid import fast_grid
from tests.planted import Bug, Bugs

LENGTHS = (1, 300, 5, 64, 65, 128, 129, 2)


def decode_case(lengths: tuple[int, ...], **options: Any) -> AttentionCase:
    return AttentionCase("decode", tuple((length - 1, 1) for length in lengths), **options)


def expect_steps(impl: type[AttentionBackend]) -> None:
    """One backend and plan, several steps: long enough that CTAs share requests."""
    batch = AttentionBatch(decode_case((400, 70), sinks=(0.5, 3.0)))
    backend = batch.backend(impl)
    plan = backend.plan(batch.forward_batch)
    for step in range(3):
        batch.expect(batch.run_planned(backend, plan), f"output of step {step}")


def test_steps_follow_one_another() -> None:
    expect_steps(TritonAttention)


@fast_grid(
    num_programs={str(n): n for n in (1, 3, 10, 40)},
    options={
        "plain": {},
        "extras": {"sliding_window": 70, "sinks": (0.5, 3.0), "logit_cap": 5.0},
        "7 heads of 80": {"num_qo_heads": 7, "num_kv_heads": 1, "head_dim": 80, "page_size": 16},
    },
)
def test_any_number_of_programs(
    num_programs: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one that does everything to one for each tile, with and without requests in several runs."""
    monkeypatch.setattr(
        "diptych.optimized.kernels.attention.decode_attention.num_split_ctas", lambda *_: num_programs
    )
    batch = AttentionBatch(decode_case(LENGTHS, **options))
    batch.expect(batch.run(TritonAttention))


def test_more_parts_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.optimized.kernels.attention.decode_attention.num_split_ctas", lambda *_: 100)
    batch = AttentionBatch(decode_case((1300, 700), num_kv_heads=4, sinks=(1.0,)))
    batch.expect(batch.run(TritonAttention))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_batches(dtype: torch.dtype) -> None:
    lengths = tuple(int(n) for n in torch.randint(1, 90, (37,), generator=torch.Generator().manual_seed(0)))
    batch = AttentionBatch(decode_case(lengths, dtype=dtype, num_qo_heads=2, num_kv_heads=1))
    batch.expect(batch.run(TritonAttention))


def test_counters_are_zero_between_steps() -> None:
    batch = AttentionBatch(decode_case((400, 3)))
    backend = TritonAttention(batch.req_to_token_pool, batch.kv_pool)
    batch.run_planned(backend, backend.plan(batch.forward_batch))
    assert not backend.counters.any()


def test_a_larger_batch_than_ever_gets_counters() -> None:
    batch = AttentionBatch(decode_case((5, 3)))
    backend = TritonAttention(batch.req_to_token_pool, batch.kv_pool)
    backend.counters = backend.counters[:1]
    small = backend.counters
    batch.expect(batch.run_planned(backend, backend.plan(batch.forward_batch)))
    assert backend.counters is not small


def test_rows_of_padding_are_harmless() -> None:
    """They read the dummy slot, which holds NaN here."""
    batch = AttentionBatch(decode_case((70, 9)))
    real, q = batch.forward_batch, batch.q
    expected = batch.expected()

    def padded(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([x, torch.full((3,), value, dtype=x.dtype, device=x.device)])

    batch.forward_batch = replace(
        real,
        **{name: padded(getattr(real, name), 0) for name in ("input_ids", "positions", "out_cache_loc")},
        req_pool_indices=padded(real.req_pool_indices, 0),
        seq_lens=padded(real.seq_lens, 1),
        extend_seq_lens=padded(real.extend_seq_lens, 1),
        extend_start_loc=torch.arange(5, device=q.device),
        seq_lens_cpu=(*real.seq_lens_cpu, 1, 1, 1),
        extend_seq_lens_cpu=(1,) * 5,
    )
    batch.q = torch.cat([q, q[:1].expand(3, -1, -1)])
    expect_close("output", batch.run(TritonAttention)[:2], expected, tolerance("attention", q.dtype))


def steps_of_one_plan(batch: AttentionBatch, run: Any) -> None:
    """The plan of a padding batch, whose buffers then hold the lengths of other steps, each up to all of a
    request's tokens."""
    real, device = batch.forward_batch, batch.q.device
    buffers = replace(
        real,
        req_pool_indices=torch.zeros_like(real.req_pool_indices),
        seq_lens=torch.ones_like(real.seq_lens),
        seq_lens_cpu=(1,) * real.batch_size,
    )
    backend = batch.backend(TritonAttention)
    assert backend.supports_cuda_graph
    plan = backend.plan_for_graph(buffers, max(real.seq_lens_cpu))
    replay = run(backend, plan)
    for lengths in ((64, 1, 3), real.seq_lens_cpu, (1, 1, 1), (300, 66, 9)):
        buffers.req_pool_indices.copy_(real.req_pool_indices)
        buffers.seq_lens.copy_(torch.tensor(lengths, device=device))
        backend.replan(plan, replace(buffers, seq_lens_cpu=lengths))
        output = replay()
        shorter = AttentionBatch(batch.case)
        shorter.slots = [slots[:length] for slots, length in zip(shorter.slots, lengths)]
        shorter.case = decode_case(lengths)
        shorter.masks = [None] * len(lengths)
        expect_close(f"lengths {lengths}", output, shorter.expected(), tolerance("attention", batch.q.dtype))


def test_a_plan_for_graphs_follows_its_buffers() -> None:
    batch = AttentionBatch(decode_case((300, 200, 10)))

    def run(backend: AttentionBackend, plan: Any) -> Any:
        return lambda: backend.run(batch.q, batch.layer, plan)

    with poisoned_allocations():
        steps_of_one_plan(batch, run)


@pytest.mark.gpu
def test_one_graph_serves_steps_of_all_lengths() -> None:
    assert check_device().type == "cuda"
    batch = AttentionBatch(decode_case((300, 200, 10)))

    def run(backend: AttentionBackend, plan: Any) -> Any:
        backend.run(batch.q, batch.layer, plan)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = backend.run(batch.q, batch.layer, plan)

        def replay() -> torch.Tensor:
            output.fill_(torch.nan)
            graph.replay()
            return output

        return replay

    steps_of_one_plan(batch, run)


BUGS = Bugs("split-KV", "split_kv", "expect_steps")
"""The contract has no sinks of requests that are long enough to be split, and no second step of them."""
for _name, _words in {
    "the counter is not reset": ("tl.store(counter_ptr, 0)", "pass"),
    "the sink counts in each part": (
        "total * rescale + weight * factor",
        "total * rescale + weight * factor + tl.where(weight > 0,"
        " tl.exp2(tl.load(sinks_ptr + offs_g[:, None]) * LOG2_E - base), 0.0)",
    ),
}.items():
    _change = ("optimized.kernels.attention.split_kv", *_words)
    BUGS.words(_name, "optimized.attention.triton:TritonAttention", FEW_CTAS, _change, says="output of step")


@BUGS.found_by(Mismatch)
def test_planted_bugs(bug: Bug) -> None:
    expect_steps(bug.planted)
