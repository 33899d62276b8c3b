"""Embedding and head on several ranks: each rank has some rows of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.shared.interfaces.collectives import Collectives


def vocabulary_rows(vocab_size: int, rank: int, size: int) -> slice:
    """The rows of embedding and head that a rank has; the last ranks may have fewer, or none."""
    num_rows = -(-vocab_size // size)
    return slice(min(rank * num_rows, vocab_size), min((rank + 1) * num_rows, vocab_size))


def embed_rows(
    embed_tokens: nn.Embedding, vocab_size: int, input_ids: torch.Tensor, tp: Collectives
) -> torch.Tensor:
    """Embed input_ids of any shape -> [..., hidden_size]. `embed_tokens`: this rank's rows. An id has its row
    on one rank and zeros on the others, so the sum is exact."""
    rows = vocabulary_rows(vocab_size, tp.rank, tp.size)
    is_here = (input_ids >= rows.start) & (input_ids < rows.stop)
    x = embed_tokens((input_ids - rows.start) * is_here)
    return tp.all_reduce(x * is_here[..., None])


def gather_logits(logits: torch.Tensor, vocab_size: int, tp: Collectives) -> torch.Tensor:
    """Gather logits: [n, this rank's rows] -> [n, vocab_size], on every rank."""
    num_missing = -(-vocab_size // tp.size) - logits.shape[1]  # in the last rank
    by_token_id = tp.all_gather(F.pad(logits, (0, num_missing)).T)
    return by_token_id[:vocab_size].T.contiguous()
