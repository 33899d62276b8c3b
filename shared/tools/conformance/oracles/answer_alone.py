"""Computes the answer of a single request without scheduler, batch or cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from diptych.shared.grammar.matcher import BaseGrammar
from diptych.shared.interfaces import Sampler
from diptych.shared.sampling.logprobs import asked_ids_of, cut_top, ranked_logprobs_of, to_token_logprobs
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.stop_conditions import check_finished
from diptych.shared.types import FinishLength, Req, TokenLogprob

LogitsOf = Callable[[Sequence[int]], torch.Tensor]
"""A history's next-token logits, [vocab_size]"""


def answer_alone(
    req: Req, logits_of: LogitsOf, sampler: Sampler, decode_text: Callable[[list[int]], str], vocab_size: int
) -> Req:
    """A new request with the parameters of `req` and its complete answer: ids, log-probabilities, finish
    reason."""
    alone = replace(
        req, output_ids=[], output_logprobs=[], input_logprobs=[], finished_reason=None, finished_len=None
    )
    params = alone.sampling_params
    prompt = alone.origin_input_ids
    if params.logprob_start_len >= 0:
        alone.input_logprobs = [
            _input_logprob(alone, position, logits_of)
            for position in range(params.logprob_start_len, len(prompt))
        ]
    if alone.max_new_tokens == 0:
        alone.finished_reason = FinishLength(0)
    while not alone.finished:
        info = make_sampling_batch_info([alone], vocab_size, "cpu")
        position = torch.tensor([alone.num_tokens - 1])
        output = sampler.sample(logits_of(alone.all_ids)[None], info, position)
        alone.output_ids += output.next_token_ids.tolist()
        if params.return_logprob:
            found = to_token_logprobs(alone.output_ids[-1:], output.logprobs)
            alone.output_logprobs += [cut_top(entry, alone) for entry in found]
        check_finished(alone, 1, decode_text, vocab_size)
    del alone.output_ids[alone.finished_len :]
    del alone.output_logprobs[alone.finished_len :]
    return alone


def _input_logprob(req: Req, position: int, logits_of: LogitsOf) -> TokenLogprob:
    token_id = req.origin_input_ids[position]
    if position == 0:
        return TokenLogprob(token_id, None)
    logits = logits_of(req.origin_input_ids[:position])[None]
    num_top, asked = req.sampling_params.top_logprobs_num, asked_ids_of([req], "cpu")
    output = ranked_logprobs_of(logits, torch.tensor([token_id]), num_top, asked)
    return cut_top(to_token_logprobs([token_id], output)[0], req)


class EveryThird(BaseGrammar):
    """Forbids a third of all tokens; the third depends on all previous tokens."""

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        forbidden = sum((i + 1) * token_id for i, token_id in enumerate(output_ids)) % 3
        bits = [token_id % 3 != forbidden for token_id in range(vocab_size)]
        words = [
            sum(bit << i for i, bit in enumerate(bits[start : start + 32]))
            for start in range(0, vocab_size, 32)
        ]
        return torch.tensor(words, dtype=torch.int64).to(torch.int32)
