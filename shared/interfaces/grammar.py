"""Contract of a grammar: what a request's output must look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Grammar(ABC):
    """Says which tokens may come next. It belongs to one request (`Req.grammar`), and the scheduler asks it
    before each token of that request is sampled, once all tokens before are known.

    Answers depend on the arguments alone, whatever was asked before: a retracted request asks the same again,
    and of drafted tokens some are not accepted. An implementation may keep its state of the last text and go
    on from there.

    A mask is [ceil(vocab_size / 32)] int32 on the CPU: bit t % 32 (low bit first) of word t // 32 is 1 when
    token t may come next.
    """

    @abstractmethod
    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """The mask after these output ids. Where no token may follow, all bits are 0, and the request ends
        with FinishError. A text that is complete may be followed by end-of-sequence tokens only."""

    @abstractmethod
    def next_tokens_at_nodes(
        self, output_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        """[num_nodes, ceil(vocab_size / 32)]: the masks after each node of a draft tree. Node 0 is the last
        of `output_ids`; a parent comes before its children. A node that the mask of its parent does not allow
        gets zeros, and so does what is below it: a token sampled there is never used."""

    def is_terminated(self, output_ids: Sequence[int]) -> bool:
        """Whether these output ids are the end: nothing may follow. Ends a request that ignores
        end-of-sequence tokens."""
        return False
