"""Chunked local attention: requests cut at chunk borders."""

from __future__ import annotations

import torch

from diptych.reference.attention import RequestPlan, virtual_requests


def request(num_queries: int, num_keys: int, first_row: int) -> RequestPlan:
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return RequestPlan(slice(first_row, first_row + num_queries), torch.arange(num_keys), visible)


def test_a_worked_example() -> None:
    requests = [request(4, 6, 0), request(10, 17, 4), request(5, 9, 14)]
    found = [local for each in requests for local in virtual_requests(each, 4)]
    assert [local.rows.stop - local.rows.start for local in found] == [2, 2, 1, 4, 4, 1, 4, 1]
    assert [len(local.slots) for local in found] == [4, 2, 4, 4, 4, 1, 4, 1]
    rows = [row for local in found for row in range(local.rows.start, local.rows.stop)]
    assert rows == list(range(19))
    for local in found:
        assert int(local.slots[0]) % 4 == 0
        num_queries, num_keys = local.visible.shape
        assert torch.equal(local.visible, request(num_queries, num_keys, 0).visible)
