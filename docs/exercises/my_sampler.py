"""Stage 06, sampling: complete the functions that raise NotImplementedError.

diptych course grade 06     # in the folder of `diptych course start`
diptych check --stage 06 my_sampler.py

The steps and their order are in shared/interfaces/sampler.py; the fields of `SamplingBatchInfo` in
shared/types/batch.py.
"""

from __future__ import annotations

import torch

from diptych.shared.interfaces import sampler as contract
from diptych.shared.sampling.logprobs import logprobs_of, sort_descending
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.sampling.processors import apply_processors
from diptych.shared.types import SampleOutput, SamplingBatchInfo

NEG_INF = float("-inf")


class Sampler(contract.Sampler):
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        """logits [bs, vocab_size], not modified; positions [bs] -> `SampleOutput(next_token_ids, logprobs)`:
        int64 [bs], where -1 is a bad row (NaN, or no token above -inf); None without `info.return_logprob`.

        In order: float32, look for NaN, `adjust`, `apply_processors(logits, info)` if there are any, scale,
        argmax of greedy rows, `draw` for the others, -1 for bad rows, log-probabilities
        (`logprobs_of(scaled, ids, info.num_top_logprobs, info.asked_ids)`) if `info.return_logprob`.
        """
        raise NotImplementedError("TODO greedy: the steps, in their order")


def adjust(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Penalties, masks, bias."""
    if info.output_counts is not None:
        logits = apply_penalties(logits, info)
    if info.vocab_mask is not None or info.banned is not None:
        logits = apply_masks(logits, info)
    return logits if info.logit_bias is None else logits + info.logit_bias


def scale(logits: torch.Tensor, max_logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """logits [bs, vocab_size] over their temperatures. A row may be shifted by a constant, which changes no
    softmax. max_logits [bs]: the largest of each row, which may be +inf."""
    raise NotImplementedError("TODO greedy: no temperature may overflow")


def draw(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """Scaled logits -> [bs] int64: the token with the largest log p + noise among those that filters keep.
    The noise of a token is `gumbel_noise(seeds, positions, token_ids)`; shapes broadcast."""
    raise NotImplementedError("TODO draw: a token with its probability, whatever the batch")


def apply_penalties(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """repetition_penalty on tokens of prompt or output; then frequency and presence penalties."""
    raise NotImplementedError("TODO masks: three penalties, each of them optional")


def apply_masks(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """-inf for tokens that `vocab_mask` (32 tokens per word, low bit first) or `banned` excludes."""
    raise NotImplementedError("TODO masks: which tokens are not allowed?")


def filter_mask(ordered: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """ordered [bs, vocab_size]: scaled logits, the likeliest token first -> bool: the tokens that stay. In
    rows of `info.is_sequential` (None: no such row) top_p is a share of what top_k keeps."""
    raise NotImplementedError("TODO filters: which tokens stay?")
