"""Contract of a grammar: what a request's output must look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Grammar(ABC):
    """Says which tokens may come next. It belongs to one request (`Req.grammar`), and the scheduler asks it
    before each token of that request is sampled, once all tokens before are known."""

    @abstractmethod
    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """[ceil(vocab_size / 32)] int32 on the CPU: bit t % 32 (low bit first) of word t // 32 is 1 when
        token t may follow these output ids. Depends on nothing else: after a
        retraction it may be asked the same again. Where no token may
        follow, all bits are 0, and the request ends with FinishError."""
