"""Rows that a request brings for layer 0, in place of the embeddings of its token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Rows at some positions of a prompt of P tokens: all of them (`input_embeds`), or those of images. The
    prompt's token ids are placeholders there."""

    positions: torch.Tensor  # [n] int64 on the CPU, ascending, below P
    # [n, k * hidden_size] on the CPU, in the model's dtype: what goes into layer 0, and, of images of
    # Qwen3-VL, what is added to the inputs of layers 1 to k - 1
    rows: torch.Tensor
    # [P]: token ids, and at `positions` digests of the content, below 0. Only the prefix cache reads them:
    # equal content is shared, and equal placeholders are not.
    key_ids: list[int]
    has_token_ids: bool  # False: no part of the prompt is text
    # [3, P] int64 on the CPU: the position of each token in time, by rows and by columns, by which it
    # rotates. None: the position in the prompt.
    rope_positions: torch.Tensor | None = None
    rope_delta: int = 0  # the position that a later token rotates by, minus its position

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.rows), f"{len(self.positions)} and {len(self.rows)}"
