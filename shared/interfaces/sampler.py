"""Contract of the sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from diptych.shared.types import SampleOutput, SamplingBatchInfo


class Sampler(ABC):
    """Logits to tokens. Stateless: the same arguments give the same result.

    In order, per row, in float32 or better:

    1. repetition_penalty r on every token in the prompt or the output: logit / r if positive, else * r;
       then minus frequency_penalty * count and minus presence_penalty for tokens in the output;
    2. `vocab_mask` and `banned` tokens become -inf;
    3. `logit_bias` is added; then each of `processors` changes its rows;
    4. greedy rows: argmax, the lowest id on ties;
    5. other rows: p = softmax(logits / temperature); order tokens by (p descending, id ascending); keep
       the first top_k; keep a token while the sum of p *before* it is < top_p (the crossing token stays);
       keep p >= min_p * max p. The three are joint: all on the same p. Renormalise what is kept. In rows of
       `is_sequential` p is renormalised over the first top_k before top_p, which then keeps the same tokens
       or fewer; min_p compares two p, and so does not depend on it. (SGLang does the latter in batches with
       min_p, and filters jointly in others);
    6. take the token with the largest log p + g, where g = -log(-log1p(-v)) and
       v = (hash(seed, position, token id) + 0.5) / 2^32: a token's noise depends on nothing else, so a
       request's tokens never depend on its batch-mates. The hash is
       `diptych.shared.sampling.noise.hash_noise`.

    Steps 5 and 6 decide as float64 does on the float32 values of (logit - largest logit) / temperature.

    A row with a NaN anywhere, one that the bias makes included, or with no token left above -inf, gets token
    id -1 and disturbs no other row. Log-probabilities: log softmax of the logits after step 3, over
    temperature (greedy rows: as is), before any filter, at the sampled token, at the num_top_logprobs best
    (ties: lowest id first) and at `asked_ids` (NaN for -1).
    """

    @abstractmethod
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        """logits [bs, vocab_size] float32, not modified. positions [bs] int64: the position of the last
        input token, i.e. seq_len - 1."""
