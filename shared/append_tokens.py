"""New tokens of a request: those that count, and whether they end it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.finish import DecodeText, check_finished
from shared.input_logprobs import cut_top
from shared.types import FinishLength, Req, TokenLogprob


def append_tokens(
    req: Req,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    decode_text: DecodeText,
    vocab_size: int,
) -> int:
    """How many of what one step gave a request are output: up to its end, if one of them is that.
    `finished_reason` says so. logprobs: of the tokens, or empty where nobody wants any."""
    if req.max_new_tokens == 0:  # only the prompt's log-probabilities or its KV were wanted
        req.finished_reason, req.finished_len = FinishLength(0), 0
        return 0
    num_before = len(req.output_ids)
    req.output_ids += token_ids
    if req.sampling_params.return_logprob:
        req.output_logprobs += [cut_top(logprob, req) for logprob in logprobs]
    check_finished(req, len(token_ids), decode_text, vocab_size)
    if req.finished_len is not None:
        del req.output_ids[req.finished_len :]  # behind its end, or a NaN's id: no output
        del req.output_logprobs[req.finished_len :]
    return len(req.output_ids) - num_before
