"""Requests for an embedding: they end with their prompt, and their last hidden state is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shared.types import FinishError, ForwardBatch, LogitsOutput, Req


def last_hidden_states(batch: ForwardBatch, output: LogitsOutput) -> torch.Tensor:
    """[bs, hidden_size] float32: after the final norm, of each request's last token."""
    assert output.hidden_states is not None
    return output.hidden_states[batch.last_token_rows].float()


def keep_embeddings(
    reqs: Sequence[Req], chunked_req: Req | None, states: torch.Tensor, head: torch.Tensor | None
) -> None:
    """Store the embeddings of the requests of a batch that want one: rows of `states`, multiplied by the head
    [num_labels, hidden_size] of a reward model. chunked_req: its prompt goes on, so its row means nothing."""
    vectors = states.cpu() if head is None else states.cpu() @ head.T
    for req, vector in zip(reqs, vectors.tolist()):
        if req.is_pooling and req is not chunked_req:
            req.embedding = vector
            if not all(map(math.isfinite, vector)):
                req.to_finish = FinishError("the hidden states held NaN or infinity")
