"""The kernel that moves KV, beyond the contract of the pool: many slots, odd sizes, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from diptych.optimized.kernels.attention.move_kv import MAX_SLOTS, can_move, move_kv
from diptych.optimized.memory_pool import TokenToKVPool
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.contracts.memory_pool.kv_pool import move_reads_before_it_writes


def check(
    num_layers: int, num_slots: int, shape: tuple[int, int], dtype: torch.dtype, num_moved: int
) -> None:
    """Targets and sources are drawn from the same few slots: most targets are sources too."""
    generator = torch.Generator().manual_seed(num_moved)
    size = (2, num_layers, num_slots, *shape)
    k, v = torch.randint(-50, 50, size, generator=generator).to(dtype).to(check_device())
    targets = torch.randperm(num_slots, generator=generator)[:num_moved].to(check_device())
    sources = torch.randint(0, num_slots, (num_moved,), generator=generator).to(check_device())
    expected_k, expected_v = k.clone(), v.clone()
    expected_k[:, targets], expected_v[:, targets] = k[:, sources], v[:, sources]
    move_kv(k, v, targets, sources)
    assert k.equal(expected_k)
    assert v.equal(expected_v)


@pytest.mark.parametrize("num_moved", [1, 2, 3, 17, 64, MAX_SLOTS])
def test_sources_are_read_first(num_moved: int) -> None:
    check(2, num_moved + 5, (2, 8), torch.float32, num_moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(1, 4), (3, 20), (8, 128)])
def test_types_and_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(3, 12, shape, dtype, 9)


def test_what_it_does_not_take() -> None:
    buffer = torch.zeros(1, 600, 1, 3, dtype=torch.float16, device=check_device())
    assert not can_move(buffer, 4)  # 6 bytes: no whole words
    assert can_move(buffer.float(), MAX_SLOTS)
    assert not can_move(buffer.float(), MAX_SLOTS + 1)
    assert not can_move(buffer.float(), 0)


@pytest.mark.parametrize("case", move_reads_before_it_writes.cases, ids=lambda case: case.name)
def test_the_pools_contract_through_the_kernel(case: object) -> None:
    class Pool(TokenToKVPool):
        def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
            if len(target_slots):
                move_kv(self._k, self._v, target_slots, source_slots)

    class Pools:
        TokenToKVPool = Pool

    move_reads_before_it_writes.check(Pools, case)


@pytest.mark.gpu
@pytest.mark.parametrize("num_moved", [5, 64, MAX_SLOTS])
def test_rings_of_a_large_pool(num_moved: int) -> None:
    for _ in range(20):
        check(28, num_moved + 1, (8, 128), torch.bfloat16, num_moved)
