"""Page tables and packed masks, as paged attention libraries read them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionBatch, AttentionCase
from diptych.shared.types import ForwardBatch

pytest.importorskip("triton")

from diptych.optimized.attention.page_tables import HostTable, PageTable
from diptych.optimized.kernels.attention.pack_mask import pack_mask

REQUESTS = ((4, 1), (0, 7), (15, 1), (16, 3), (31, 33), (0, 1), (600, 2))


def made(
    page_size: int, window: int, requests: Any = REQUESTS
) -> tuple[AttentionBatch, HostTable, PageTable]:
    batch = AttentionBatch(AttentionCase("", requests, page_size=page_size, head_dim=1))
    host = HostTable.of(batch.forward_batch, page_size, window)
    indices = torch.full((host.num_pages + 3,), -7, dtype=torch.int32, device=check_device())
    table = PageTable.empty(len(requests), check_device(), indices)
    table.fill(host, batch.req_to_token_pool, batch.forward_batch, page_size, window)
    return batch, host, table


@pytest.mark.parametrize("window", [-1, 0, 5, 16, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_table_lists_the_pages_of_what_is_seen(page_size: int, window: int) -> None:
    batch, host, table = made(page_size, window)
    indptr, indices = table.indptr.tolist(), table.indices.tolist()
    assert indptr[0] == 0
    assert indices[indptr[-1] :] == [-7] * 3
    for i, (cached, new) in enumerate(REQUESTS):
        first_seen = max(cached - window, 0) if window >= 0 else 0
        slots = batch.slots[i].tolist()[first_seen // page_size * page_size :]
        assert indices[indptr[i] : indptr[i + 1]] == [slot // page_size for slot in slots[::page_size]]
        assert table.last_page_len[i] == (cached + new - 1) % page_size + 1
        assert host.kv_lens[i] == len(slots)


@pytest.mark.parametrize("window", [-1, 0, 7])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_host_counts_what_the_device_writes(page_size: int, window: int) -> None:
    _, host, table = made(page_size, window)
    assert host.indptr.tolist() == table.indptr.tolist()
    assert host.last_page_len.tolist() == table.last_page_len.tolist()
    assert host.max_pages == max(b - a for a, b in pairwise(host.indptr.tolist()))


def test_a_batch_of_one_and_a_batch_beyond_the_smallest_block() -> None:
    for requests in (((9, 1),), ((3, 1),) * 131):
        batch, host, table = made(4, -1, requests)
        assert table.indptr.tolist() == host.indptr.tolist()
        expected = [slot // 4 for slots in batch.slots for slot in slots[::4].tolist()]
        assert table.indices[: host.num_pages].tolist() == expected


def test_a_request_without_new_tokens_and_without_a_visible_page() -> None:
    batch = AttentionBatch(AttentionCase("", ((7, 1), (3, 2)), page_size=4, head_dim=1))
    forward_batch: ForwardBatch = batch.forward_batch_of([(0, 8, 8), (1, 3, 5)], batch.case.forward_mode)
    host = HostTable.of(forward_batch, 4, window=0)
    table = PageTable.empty(2, check_device(), torch.empty(4, dtype=torch.int32, device=check_device()))
    table.fill(host, batch.req_to_token_pool, forward_batch, 4, window=0)
    assert table.indptr.tolist() == host.indptr.tolist() == [0, 0, 2]


def test_masks_are_packed_request_by_request() -> None:
    case = AttentionCase("", ((12, 2), (1, 30), (150, 11), (0, 5)), mask="random", head_dim=1)
    forward_batch, masks = AttentionBatch(case).forward_batch, AttentionBatch(case).masks
    num_bytes = [-(-new * (cached + new) // 8) for cached, new in case.requests]
    packed = torch.full((sum(num_bytes),), 255, dtype=torch.uint8, device=check_device())
    indptr = torch.empty(5, dtype=torch.int32, device=check_device())
    assert forward_batch.custom_mask is not None
    lens = forward_batch.seq_lens, forward_batch.extend_seq_lens
    pack_mask(forward_batch.custom_mask, *lens, packed, indptr, max(num_bytes))
    starts = indptr.tolist()
    assert [b - a for a, b in pairwise(starts)] == num_bytes
    for start, mask in zip(starts, masks):
        assert mask is not None
        bits = [packed[start + i // 8] >> (i % 8) & 1 for i in range(mask.numel())]
        assert torch.equal(torch.stack(bits).bool().cpu(), mask.flatten())
