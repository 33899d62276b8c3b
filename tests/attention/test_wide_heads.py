"""Heads of more than 256 numbers, as in Gemma 4's layers of full attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.attention.triton import TritonAttention
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionCase, expect_attention

REQUESTS = {
    "decode": ((4, 1), (0, 1), (63, 1), (130, 1)),
    "extend": ((17, 3), (0, 37), (64, 1)),
}
EXTRAS = {"sliding_window": 6, "logit_cap": 2.0, "scale": 1.0}


@pytest.mark.parametrize("options", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("head_dim", [260, 512])
@pytest.mark.parametrize("requests", REQUESTS)
def test_wide_heads(requests: str, head_dim: int, options: dict[str, Any]) -> None:
    heads = {"num_qo_heads": 8, "num_kv_heads": 1, "head_dim": head_dim}
    for dtype in (torch.float32, torch.bfloat16):
        case = AttentionCase(requests, REQUESTS[requests], **heads, dtype=dtype, page_size=4, **options)
        expect_attention(TritonAttention, case)
