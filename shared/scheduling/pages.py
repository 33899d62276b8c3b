"""Rounding of lengths to pages, for one length or an array of lengths."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt

Count = TypeVar("Count", int, npt.NDArray[Any])


def num_pages_of(num_tokens: Count, page_size: int) -> Count:
    """Pages that hold `num_tokens` tokens; the last page may be partial."""
    return -(-num_tokens // page_size)


def round_up_to_page(num_tokens: Count, page_size: int) -> Count:
    """Slots of the pages that hold `num_tokens` tokens."""
    return num_pages_of(num_tokens, page_size) * page_size


def round_down_to_page(num_tokens: Count, page_size: int) -> Count:
    """The most tokens, at most `num_tokens`, that fill whole pages."""
    return num_tokens // page_size * page_size
