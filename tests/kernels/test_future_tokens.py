"""The launch that puts tokens in place of names, against the operations of torch that say what it means."""

from __future__ import annotations

import pytest
import torch

from optimized import future_map
from optimized.kernels.future_tokens import BLOCK, tokens_of
from shared.conformance.device import check_device


@pytest.mark.parametrize("num_ids", [1, 2, 63, BLOCK, BLOCK + 1])
def test_tokens_for_names(num_ids: int) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    ring = torch.randint(-1, 2**40, (1000,), generator=generator)
    ids = torch.randint(-999, 1000, (num_ids,), generator=generator)
    ids[0] = -999
    ring[999] = -1
    found = tokens_of(ids.to(check_device()), ring.to(check_device()))
    assert found.dtype == torch.int64
    assert torch.equal(found.cpu(), future_map.tokens_of(ids, ring))
    assert found[0] == 0, "what is no token becomes 0"
