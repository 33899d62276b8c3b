"""The reference's pools beyond their contract (tests/conformance), and a search for calls that break it."""

from __future__ import annotations

import pytest
import torch

from diptych.reference import memory_pool
from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.contracts.memory_pool.allocator_sequences import Call, Run
from diptych.shared.types.attention import FP8, KVScales
from tests.properties import given, settings, st


@pytest.mark.parametrize(("size", "page_size"), [(0, 1), (-4, 4), (6, 4), (2, 4), (4, 0)])
def test_a_bad_size_is_named(size: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"{size}.*{page_size}"):
        memory_pool.TokenToKVPoolAllocator(size, page_size, "cpu")


def test_write_beyond_the_row_is_an_error() -> None:
    pool = memory_pool.ReqToTokenPool(1, 4, "cpu")
    (row,) = pool.alloc(1)
    with pytest.raises(AssertionError, match=r"3\.\.5 do not fit a row of 4"):
        pool.write(row, 3, torch.tensor([5, 6]))


def test_a_request_cannot_shrink() -> None:
    with pytest.raises(AssertionError, match="from 5 to 4"):
        memory_pool.TokenToKVPoolAllocator(16, 4, "cpu").alloc_extend([5], [4], [8])


@pytest.mark.parametrize("panel", ["reference", "optimized"])
def test_latent_rows_in_fp8_are_divided_by_their_scale(panel: str) -> None:
    pool_class = registry.load("mla_memory_pool", panel)
    k = torch.full((1, 1, 6), 8.0)
    for scales, stored in (([KVScales(4.0, 1.0)], 2.0), (None, 8.0)):
        pool = pool_class(4, 1, 1, 4, 2, FP8, "cpu", scales)
        pool.store(0, torch.tensor([3]), k, k[..., :4])
        assert pool.k_buffer(0)[3].float().unique().tolist() == [stored]


def test_buffers_are_not_copied_on_the_way_out() -> None:
    pool = memory_pool.TokenToKVPool(16, 4, 3, 2, 5, torch.float64, "cpu")
    for buffer in (pool.k_buffer, pool.v_buffer):
        assert buffer(2).data_ptr() == buffer(2).data_ptr() != buffer(1).data_ptr()


CALL = st.builds(
    Call,
    kind=st.sampled_from(["extend", "extend", "decode", "decode", "finish"]),
    which=st.integers(0, 8),
    num_tokens=st.integers(0, 48),
    is_pair=st.booleans(),
)


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@settings(max_examples=80)
@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.integers(1, 12),
    calls=st.integers(0, 25).flatmap(lambda n: st.lists(CALL, min_size=n, max_size=n)),
)
def test_no_calls_break_the_allocator(panel: str, page_size: int, num_pages: int, calls: list[Call]) -> None:
    Run(
        registry.load("memory_pool", panel),
        Case("found", page_size=page_size, num_pages=num_pages, calls=tuple(calls)),
    ).play()
