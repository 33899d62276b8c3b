"""ReqToTokenPool and TokenToKVPool: every clause of their contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared import registry

IMPLS = ["reference"]


@pytest.fixture(params=IMPLS)
def pools(request: pytest.FixtureRequest) -> Any:
    return registry.load("memory_pool", request.param)


def make_kv_pool(pools: Any, dtype: torch.dtype = torch.float32, page_size: int = 4) -> Any:
    return pools.TokenToKVPool(
        16, page_size, num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype, device="cpu"
    )


class TestReqToTokenPool:
    def test_rows_are_distinct_and_row_0_is_never_handed_out(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(5, 8, "cpu")
        assert pool.req_to_token.shape == (6, 8)
        assert pool.req_to_token.dtype == torch.int32
        assert pool.available_size() == 5
        rows = pool.alloc(2) + pool.alloc(3)
        assert sorted(rows) == [1, 2, 3, 4, 5]
        assert pool.available_size() == 0

    def test_alloc_takes_nothing_when_short(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(3, 8, "cpu")
        assert pool.alloc(4) is None
        assert pool.available_size() == 3
        assert pool.alloc(0) == []
        assert len(pool.alloc(3)) == 3
        assert pool.alloc(1) is None

    def test_first_freed_first_handed_out(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(3, 8, "cpu")
        a, b, c = pool.alloc(3)
        pool.free([b])
        pool.free([c, a])
        assert [pool.alloc(1), pool.alloc(2)] == [[b], [c, a]]

    @pytest.mark.parametrize("row", [0, 2, 7])
    def test_a_row_not_handed_out_cannot_be_freed(self, pools: Any, row: int) -> None:
        pool = pools.ReqToTokenPool(3, 8, "cpu")
        pool.alloc(1)
        with pytest.raises(AssertionError):
            pool.free([row])
        assert pool.available_size() == 2

    def test_a_row_freed_twice_is_an_error(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(3, 8, "cpu")
        rows = pool.alloc(2)
        pool.free(rows)
        with pytest.raises(AssertionError):
            pool.free(rows[:1])

    def test_write_and_read_touch_just_their_positions(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(3, 6, "cpu")
        a, b, _ = pool.alloc(3)
        pool.write(a, 0, torch.arange(10, 16))
        pool.write(b, 0, torch.arange(20, 26))
        pool.write(a, 2, torch.tensor([77, 78]))
        pool.write(a, 6, torch.tensor([], dtype=torch.int64))
        assert pool.read(a, 0, 6).tolist() == [10, 11, 77, 78, 14, 15]
        assert pool.read(b, 1, 4).tolist() == [21, 22, 23]
        assert pool.read(a, 3, 3).tolist() == []
        assert pool.read(a, 0, 6).dtype == torch.int64
        assert pool.req_to_token[0].tolist() == [0] * 6

    def test_read_is_a_copy(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(1, 4, "cpu")
        (row,) = pool.alloc(1)
        pool.write(row, 0, torch.tensor([5, 6]))
        pool.read(row, 0, 2).fill_(99)
        assert pool.read(row, 0, 2).tolist() == [5, 6]

    def test_write_beyond_the_row_is_an_error(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(1, 4, "cpu")
        (row,) = pool.alloc(1)
        with pytest.raises(AssertionError):
            pool.write(row, 3, torch.tensor([5, 6]))

    def test_clear_frees_all_rows(self, pools: Any) -> None:
        pool = pools.ReqToTokenPool(3, 4, "cpu")
        pool.alloc(2)
        pool.clear()
        assert sorted(pool.alloc(3)) == [1, 2, 3]


class TestTokenToKVPool:
    def test_buffers_have_a_dummy_page_and_are_views(self, pools: Any) -> None:
        pool = make_kv_pool(pools)
        for buffer in (pool.k_buffer, pool.v_buffer):
            assert buffer(2).shape == (16 + 4, 2, 5)
            buffer(2)[7] = 1.5
            assert torch.equal(buffer(2)[7], torch.full((2, 5), 1.5))
            assert buffer(2).data_ptr() == buffer(2).data_ptr() != buffer(1).data_ptr()

    def test_store_writes_one_layer_at_its_slots_only(self, pools: Any) -> None:
        pool = make_kv_pool(pools)
        k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
        out_cache_loc = torch.tensor([9, 4, 19])
        pool.store(1, out_cache_loc, k, v)
        assert torch.equal(pool.k_buffer(1)[out_cache_loc], k)
        assert torch.equal(pool.v_buffer(1)[out_cache_loc], v)
        for layer_id in range(3):
            untouched = torch.ones(20, dtype=torch.bool)
            if layer_id == 1:
                untouched[out_cache_loc] = False
            assert not pool.k_buffer(layer_id)[untouched].any()
            assert not pool.v_buffer(layer_id)[untouched].any()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_store_casts_to_the_dtype_of_the_pool(self, pools: Any, dtype: torch.dtype) -> None:
        pool = make_kv_pool(pools, dtype)
        assert pool.dtype == dtype
        k, v = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
        pool.store(0, torch.tensor([4, 5]), k, v)
        assert torch.equal(pool.k_buffer(0)[4:6], k.to(dtype))
        assert torch.equal(pool.v_buffer(0)[4:6], v.to(dtype))

    def test_several_tokens_may_go_to_the_dummy_page(self, pools: Any) -> None:
        """Padding writes to slot 0; live slots stay as they are."""
        pool = make_kv_pool(pools)
        live = torch.randn(1, 2, 5)
        padding = torch.randn(3, 2, 5)
        pool.store(0, torch.tensor([0, 6, 0, 0]), *[torch.cat([padding[:1], live, padding[1:]])] * 2)
        assert torch.equal(pool.k_buffer(0)[6:7], live)
        assert not pool.k_buffer(0)[1:6].any()
        assert not pool.k_buffer(0)[7:].any()

    def test_move_copies_all_layers(self, pools: Any) -> None:
        pool = make_kv_pool(pools)
        for layer_id in range(3):
            pool.store(layer_id, torch.arange(20), torch.randn(20, 2, 5), torch.randn(20, 2, 5))
        before = [(pool.k_buffer(i).clone(), pool.v_buffer(i).clone()) for i in range(3)]
        pool.move(torch.tensor([4, 5]), torch.tensor([12, 9]))
        for layer_id, (k, v) in enumerate(before):
            k[[4, 5]], v[[4, 5]] = k[[12, 9]], v[[12, 9]]
            assert torch.equal(pool.k_buffer(layer_id), k)
            assert torch.equal(pool.v_buffer(layer_id), v)

    def test_move_reads_all_sources_before_it_writes(self, pools: Any) -> None:
        """A chain 4 <- 5 <- 6 <- 4: done one by one, a slot would be lost."""
        pool = make_kv_pool(pools)
        k = torch.arange(20.0)[:, None, None].expand(20, 2, 5)
        for layer_id in range(3):
            pool.store(layer_id, torch.arange(20), k, -k)
        pool.move(torch.tensor([4, 5, 6]), torch.tensor([5, 6, 4]))
        for layer_id in range(3):
            assert pool.k_buffer(layer_id)[4:8, 0, 0].tolist() == [5, 6, 4, 7]
            assert pool.v_buffer(layer_id)[4:8, 1, 4].tolist() == [-5, -6, -4, -7]

    def test_bytes_per_token_count_k_and_v_of_all_layers(self, pools: Any) -> None:
        assert make_kv_pool(pools, torch.bfloat16).num_bytes_per_token == 2 * 3 * 2 * 5 * 2
        pool = make_kv_pool(pools, torch.float32, page_size=1)
        num_bytes = sum(
            buffer(i).numel() * buffer(i).element_size()
            for i in range(3)
            for buffer in (pool.k_buffer, pool.v_buffer)
        )
        assert pool.num_bytes_per_token * (16 + 1) == num_bytes
