"""A model whose KV cache can be read: schedulers are tested against it, thousands of steps a second.

It keeps in each slot the token that was written there. A forward pass reads every request's whole history
back through req_to_token, as attention would, and the next token is a hash of that history. So a slot
that is freed too early, written twice, or mapped to the wrong position changes the output; and the right
output of a prompt is known without any engine (`expected_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.interfaces import ReqToTokenPool
from shared.interfaces import model_runner as interface
from shared.types import ForwardBatch, LogitsOutput

POISON = -1
"""What a slot holds that nobody has written: reading it is an error."""


def next_token(history: Sequence[int], vocab_size: int) -> int:
    """A token that depends on every token before it, and on their order."""
    h = 17
    for token in history:
        h = (h * 31 + token + 1) % 1_000_003
    return h % vocab_size


def expected_tokens(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The output that any correct scheduler produces for a prompt."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history, vocab_size))
    return history[len(prompt) :]


class LedgerModelRunner(interface.ModelRunner):
    """`nan_token`: a history that ends with this token gives NaN logits. `fail_token`: a batch that holds
    it raises. Both stay away from other requests' rows."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        num_slots: int,
        vocab_size: int,
        nan_token: int | None = None,
        fail_token: int | None = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.vocab_size = vocab_size
        self.nan_token = nan_token
        self.fail_token = fail_token
        self.ledger = torch.full((num_slots,), POISON, dtype=torch.int64)
        self.num_computed_tokens = 0

    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        fb = forward_batch
        assert int(fb.out_cache_loc.min()) > 0, "the dummy page was written for a real token"
        assert len(set(fb.out_cache_loc.tolist())) == fb.num_tokens, "two tokens were given one slot"
        if self.fail_token is not None and (fb.input_ids == self.fail_token).any():
            raise RuntimeError("the model failed, as it was told to")
        self.ledger[fb.out_cache_loc] = fb.input_ids
        self.num_computed_tokens += fb.num_tokens

        logits = torch.full((fb.batch_size, self.vocab_size), -10.0)
        starts = fb.extend_start_loc.tolist()
        for i, (row, seq_len) in enumerate(zip(fb.req_pool_indices.tolist(), fb.seq_lens_cpu)):
            slots = self.req_to_token_pool.req_to_token[row, :seq_len].long()
            history = self.ledger[slots]
            extend_len = fb.extend_seq_lens_cpu[i]
            own = slice(starts[i], starts[i] + extend_len)
            assert torch.equal(slots[-extend_len:], fb.out_cache_loc[own]), (
                "a row does not name its new slots"
            )
            assert torch.equal(fb.positions[own], torch.arange(seq_len - extend_len, seq_len)), (
                "wrong positions"
            )
            assert int(history.min()) != POISON, "a slot was read that nobody has written"
            if self.nan_token is not None and int(history[-1]) == self.nan_token:
                logits[i] = torch.nan
            else:
                logits[i, next_token(history.tolist(), self.vocab_size)] = 10.0
        return LogitsOutput(logits)
