"""The case of a clause that must hold whatever the page size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageSize:
    name: str
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is at least 1, not {self.page_size}")


def page_sizes(*sizes: int) -> tuple[PageSize, ...]:
    return tuple(PageSize(f"page {size}", size) for size in sizes)
