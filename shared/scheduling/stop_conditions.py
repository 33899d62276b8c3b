"""When a request is done: one check for all reasons, after tokens were appended to its output."""

from __future__ import annotations

from diptych.shared.sampling.bans import bans_every_token
from diptych.shared.text.stop_text import (
    MAX_CHARACTER_BYTES,
    NUM_CONTEXT_TOKENS,
    REGEX_SECONDS,
    REPLACEMENT,
    DecodeText,
    OutputScan,
    RegexTimeout,
    first_stop_string,
)
from diptych.shared.types import (
    FinishError,
    FinishLength,
    FinishReason,
    FinishRegex,
    FinishString,
    FinishToken,
    Req,
)

_WINDOW_SLACK = 8
"""Characters beyond the longest stop string: a window may begin inside a character and show it as up to
three replacement characters."""


def check_finished(req: Req, num_new_tokens: int, decode_text: DecodeText, vocab_size: int) -> None:
    """Set `finished_reason` and `finished_len` if one of the last `num_new_tokens` output ids ends `req`.

    A wish to end (`to_finish`) goes first, and the new tokens do not count. Otherwise the earliest token
    that gives a reason wins, whatever the reason. Reasons of one token, in this order:

    1. it is no token (< 0 or >= vocab_size: the logits held NaN, or every token is banned): FinishError,
       not counted;
    2. an end-of-sequence or stop token, unless ignore_eos; with ignore_eos the one that ends the grammar's
       text, because nothing may follow it;
    3. a stop string is in the text so far; of several the one that begins first;
    4. a stop regex matches in the text so far; likewise; a regex that takes too long: FinishError;
    5. the token is number max_new_tokens. Last, so that an answer that is complete says so ("stop") even
       if it has the greatest length.

    `min_new_tokens` is not looked at: the sampler bans stop tokens until then, and stop strings and regexes
    end a request at any length. ignore_eos does not disable them.

    `decode_text` is called only for requests with stop strings or stop regexes, on a tail of the output,
    whatever its length.
    """
    if req.finished:
        return
    start = len(req.output_ids) - num_new_tokens
    assert start >= 0
    if req.to_finish is not None:
        req.finished_reason, req.finished_len = req.to_finish, start
        return
    if req.max_new_tokens == 0:  # only the prompt's log-probabilities, its KV or its embedding were wanted
        req.finished_reason, req.finished_len = FinishLength(0), 0
        return

    params = req.sampling_params
    # --8<-- [start:reasons-to-finish]
    for position in range(start, len(req.output_ids)):
        token_id, count = req.output_ids[position], position + 1
        if not 0 <= token_id < vocab_size:
            req.finished_reason, req.finished_len = _no_token(req, position, vocab_size), position
            return
        reason: FinishReason | None = None
        is_stop = token_id in req.eos_token_ids or token_id in params.stop_token_ids
        if params.ignore_eos:
            is_stop = req.grammar is not None and req.grammar.is_terminated(req.output_ids[:count])
        if is_stop:
            reason = FinishToken(token_id)
        elif params.stop or params.stop_regex:
            reason = _match_stop_text(req, count, decode_text)
        if reason is None and count >= req.max_new_tokens:
            reason = FinishLength(count)
        if reason is not None:
            req.finished_reason, req.finished_len = reason, count
            return
    # --8<-- [end:reasons-to-finish]


def _no_token(req: Req, position: int, vocab_size: int) -> FinishError:
    where = f"no token at output position {position}"
    if bans_every_token(req, position, vocab_size):
        message = f"{where}: every token is banned by the sampling parameters or the grammar"
        return FinishError(message, status=400)
    return FinishError(f"{where}: the model's logits held NaN")


def held_nan(req: Req, vocab_size: int) -> bool:
    """Whether the logits of a step that gave no token held NaN; otherwise every token is banned."""
    return not bans_every_token(req, len(req.output_ids), vocab_size)


def _match_stop_text(req: Req, count: int, decode_text: DecodeText) -> FinishReason | None:
    """Why the first `count` output ids end the request, given that the first `count - 1` do not."""
    params = req.sampling_params
    if params.stop:
        text = _tail_text(req, count, max(map(len, params.stop)) + _WINDOW_SLACK, decode_text)
        matched = first_stop_string(text, params.stop)
        if matched is not None:
            return FinishString(matched)
    if params.stop_regex:
        try:
            found = _scan(req, count, decode_text).search(params.stop_regex, REGEX_SECONDS)
        except RegexTimeout as error:
            return FinishError(str(error), status=400)
        if found is not None:
            return FinishRegex(*found)
    return None


def _scan(req: Req, count: int, decode_text: DecodeText) -> OutputScan:
    """The scan of the first `count` output ids. The one of `count - 1` goes on, unless ids were dropped."""
    scan = req.output_scan
    if scan is None or scan.num_ids != count - 1:
        scan = req.output_scan = OutputScan(req.prompt_text_ids[-NUM_CONTEXT_TOKENS:], decode_text)
    for token_id in req.output_ids[scan.num_ids : count]:
        scan.append(token_id)
    return scan


def _tail_text(req: Req, count: int, num_chars: int, decode_text: DecodeText) -> str:
    """Text of a tail of the first `count` output ids: the last of them and at least `num_chars` before it."""
    num_tokens, num_shifts = num_chars + 1, 0
    num_last_chars = len(decode_text(req.output_ids[count - 1 : count]))
    while num_tokens < count:
        text = decode_text(req.output_ids[count - num_tokens : count])
        if text.startswith(REPLACEMENT) and num_shifts < MAX_CHARACTER_BYTES - 1:  # begins inside a character
            num_tokens += 1
            num_shifts += 1
        elif len(text) - num_last_chars < num_chars:  # tokens of less than a character
            num_tokens *= 2
        else:
            return text
    return _output_text(req, count, decode_text)


def _output_text(req: Req, count: int, decode_text: DecodeText) -> str:
    """Text of the first `count` output ids, as it follows the prompt."""
    context = req.prompt_text_ids[-NUM_CONTEXT_TOKENS:]
    return decode_text(context + req.output_ids[:count])[len(decode_text(context)) :]
