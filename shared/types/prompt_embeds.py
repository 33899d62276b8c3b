"""Rows that a request brings for layer 0, in place of the embeddings of its token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Rows at some positions of a prompt of P tokens: all of them (`input_embeds`), or those of images. The
    prompt's token ids are placeholders there."""

    positions: torch.Tensor  # [n] int64 on the CPU, ascending, below P
    rows: torch.Tensor  # [n, hidden_size] on any device, in the model's dtype: what goes into layer 0
    # [P]: token ids, and at `positions` digests of the content, below 0. Only the prefix cache reads them:
    # equal content is shared, and equal placeholders are not.
    key_ids: list[int]
    has_token_ids: bool  # False: no part of the prompt is text

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.rows), f"{len(self.positions)} and {len(self.rows)}"
