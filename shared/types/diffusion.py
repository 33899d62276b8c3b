"""How a request is answered by block diffusion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DiffusionParams:
    """Raises `ValueError` for values outside of their range."""

    mask_id: int  # stands for a token that is not known yet
    block_len: int = 4  # as in training: 4 in SDAR, 32 in LLaDA2
    threshold: float = 0.95  # tokens that are more likely are filled in; and at least one

    def __post_init__(self) -> None:
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, got {self.mask_id}")
        if self.block_len < 1:
            raise ValueError(f"block_len must be at least 1, got {self.block_len}")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold must be between 0 and 1, got {self.threshold}")
