"""Decode attention over FP8 pools beyond its contract: keys divided among CTAs, and bugs that it catches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.attention.triton import TritonAttention
from diptych.optimized.kernels.attention import fp8_decode_attention as kernel
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionBatch, AttentionCase
from diptych.shared.types.attention import FP8, KVScales
from tests.conformance.mutants.optimized_attention import FEW_CTAS
from tests.planted import Bug, Bugs

SIZES: dict[str, Any] = {"dtype": torch.float16, "num_qo_heads": 4, "num_kv_heads": 1, "head_dim": 128}
EXTRAS = {"sliding_window": 150, "sinks": (0.5, 3.0, 0.1, 0.0), "logit_cap": 5.0, "page_size": 4}


def expect(impl: type[AttentionBackend], lengths: tuple[int, ...], **options: Any) -> None:
    queries = tuple((length - 1, 1) for length in lengths)
    batch = AttentionBatch(AttentionCase("decode", queries, kv_scales=KVScales(0.5, 2.0), **SIZES | options))
    batch.expect(batch.run(impl))


FAST = ((1, "extras"), (4, "plain"), (10, "extras"))


@pytest.mark.parametrize(
    ("num_programs", "options"),
    [
        pytest.param(num, options, id=f"{num}-{name}", marks=[] if (num, name) in FAST else pytest.mark.full)
        for num in (1, 4, 10)
        for name, options in (("plain", {}), ("extras", EXTRAS))
    ],
)
def test_any_number_of_programs(
    num_programs: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one that does everything to one for each tile, with and without requests in several runs."""
    monkeypatch.setattr(kernel, "MIN_REQUESTS", 1)
    monkeypatch.setattr(kernel, "num_split_ctas", lambda *_: num_programs)
    expect(TritonAttention, (1, 300, 129), **options)


@pytest.mark.parametrize("num_heads", [7, 8])
def test_heads_of_a_group(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MIN_REQUESTS", 1)
    expect(TritonAttention, (40, 3), num_qo_heads=num_heads, dtype=torch.bfloat16)


def test_one_warp_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MIN_REQUESTS", 1)
    monkeypatch.setattr(kernel, "WARPS", 1)
    expect(TritonAttention, (40, 70))


def test_many_requests() -> None:
    expect(TritonAttention, tuple(range(1, 18)))


def test_what_the_kernel_computes() -> None:
    def suits(num_qo_heads: int, head_dim: int, dtype: torch.dtype, pool: torch.dtype = FP8) -> bool:
        q = torch.empty(16, num_qo_heads, head_dim, dtype=dtype, device=check_device())
        return kernel.suits_fp8_kernel(q, torch.empty(9, 2, head_dim).to(q.device, pool))

    assert suits(16, 128, torch.bfloat16)
    assert not suits(18, 128, torch.bfloat16)
    assert not suits(16, 64, torch.bfloat16)
    assert not suits(16, 128, torch.float32)
    assert not suits(16, 128, torch.bfloat16, torch.bfloat16)


BUGS = Bugs("fp8 attention", finder="expect")
for _name, (_file, *_words) in {
    "asks with the query before": ("fp8_decode_attention", "q_heads + next_request *", "q_heads + request *"),
    "values of the other key": ("fp8_tiles", "i // 2 * 8 + i % 2", "i // 2 * 8 + 1 - i % 2"),
    "keys beyond the end": ("fp8_tiles", "(position < seq_len) & ", ""),
    "window forgotten": ("fp8_tiles", " & (position >= first_key)", ""),
    "sums are not rescaled": ("fp8_decode_attention", "* rescale0 + sum0", "+ sum0"),
}.items():
    _folder = "optimized.kernels.attention"
    _few_requests = (f"{_folder}.fp8_decode_attention", "MIN_REQUESTS = 16", "MIN_REQUESTS = 1")
    _changes = FEW_CTAS, (f"{_folder}.{_file}", *_words), _few_requests
    BUGS.words(_name, "optimized.attention.triton:TritonAttention", *_changes, where=_file)


@BUGS.found_by(Mismatch, is_fast=lambda number, _: number <= 1)
def test_planted_bugs(bug: Bug) -> None:
    expect(bug.planted, (1, 300, 129, 513), **EXTRAS)
    expect(bug.planted, (900, 130))
