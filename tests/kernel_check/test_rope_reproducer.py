"""The reproducer finds nothing in a right function, and what FlashInfer's kernel does to heads of 80 dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernel_check.right import rope_in_place
from tests.kernel_check.rope_reproducer import wrong


def in_pieces(positions: Any, q: Any, k: Any, head_dim: int, cache: Any, is_neox: bool) -> None:
    """A piece of 16 numbers is turned as the half in which it begins; one may lie in both."""
    x, half = q.view(len(q), -1, head_dim).float(), head_dim // 2
    rows = torch.stack([cache.flatten()[at : at + 2 * head_dim] for at in (positions * head_dim).tolist()])
    for start in range(0, head_dim, 16):
        place, sign = start % half, -1 if start < half else 1
        cos, sin = rows[:, place : place + 16], rows[:, half + place : half + place + 16]
        other = x.roll(sign * half, -1)[..., start : start + 16]
        turned = x[..., start : start + 16] * cos[:, None] + sign * other * sin[:, None]
        q.view(x.shape)[..., start : start + 16] = turned.to(q.dtype)


def test_a_piece_that_crosses_the_half_is_found() -> None:
    assert [wrong(rope_in_place, head_dim, True) for head_dim in (64, 80)] == ["", ""]
    assert wrong(in_pieces, 96, True) == ""
    assert "1024 of 1024 tokens, dims 40 to 47;" in wrong(in_pieces, 80, True)


@pytest.mark.gpu
def test_flashinfer_is_right_for_64_and_128_dims_alone() -> None:
    import flashinfer

    rotate = flashinfer.apply_rope_with_cos_sin_cache_inplace
    assert [wrong(rotate, head_dim, True) for head_dim in (64, 128)] == ["", ""]
    if flashinfer.__version__ in ("0.6.12", "0.7.2"):
        assert all(wrong(rotate, head_dim, True) for head_dim in (80, 96))
