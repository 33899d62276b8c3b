"""Tokens that a request may not produce: for ever, before min_new_tokens, or because a bad word would end."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from diptych.shared.to_device import to_device
from diptych.shared.types import Req, SamplingParams


def is_banned_for_ever(params: SamplingParams, token_id: int) -> bool:
    """Whether no answer has the token, by logit_bias, allowed_token_ids, or as a bad word of its own."""
    if params.logit_bias.get(token_id) == -math.inf or (token_id,) in params.bad_word_ids:
        return True
    return params.allowed_token_ids is not None and token_id not in params.allowed_token_ids


def early_stops(req: Req, num_outputs: int) -> Collection[int]:
    """Stop tokens while the output is shorter than min_new_tokens. With ignore_eos nothing stops at them, so
    they stay allowed."""
    params = req.sampling_params
    if num_outputs >= params.min_new_tokens or params.ignore_eos:
        return ()
    return (*req.eos_token_ids, *params.stop_token_ids)


def ends_of_bad_words(params: SamplingParams, output_ids: Sequence[int]) -> list[int]:
    """The tokens that would complete a bad word of several tokens behind this output."""
    return [
        ids[-1]
        for ids in params.bad_word_ids
        if len(ids) > 1 and tuple(output_ids[-len(ids) + 1 :]) == ids[:-1]
    ]


def banned_tokens(
    reqs: Sequence[Req],
    num_outputs: Sequence[int],
    vocab_size: int,
    device: torch.device | str,
    reads_texts: bool = True,
) -> torch.Tensor | None:
    """bool [bs, vocab_size]; None where nothing is banned. reads_texts: include `ends_of_bad_words`."""
    bans = [_bans_of(req, num, reads_texts) for req, num in zip(reqs, num_outputs)]
    entries = [(row, i) for row, ids in enumerate(bans) for i in ids if i < vocab_size]
    limits = [req.sampling_params.allowed_token_ids for req in reqs]
    limited = [row for row, allowed in enumerate(limits) if allowed is not None]
    if not entries and not limited:
        return None
    banned = torch.zeros(len(reqs), vocab_size, dtype=torch.bool, device=device)
    if limited:
        banned[to_device(limited, torch.int64, device)] = True
        set_entries(banned, [(row, i) for row in limited for i in limits[row] or () if i < vocab_size], False)
    set_entries(banned, entries, True)
    return banned


def set_entries(matrix: torch.Tensor, entries: Sequence[tuple[int, int]], value: bool) -> None:
    """Write `value` at (row, column) of each entry."""
    if entries:
        rows, columns = zip(*entries)
        matrix[tuple(to_device(each, torch.int64, matrix.device) for each in (rows, columns))] = value


def _bans_of(req: Req, num_outputs: int, reads_texts: bool) -> list[int]:
    """Without those that allowed_token_ids leaves out."""
    params = req.sampling_params
    ids = [token_id for token_id, bias in params.logit_bias.items() if bias == -math.inf]
    ids += early_stops(req, num_outputs)
    ids += [ids[0] for ids in params.bad_word_ids if len(ids) == 1]
    if reads_texts and params.bans_sequences:
        ids += ends_of_bad_words(params, req.output_ids)
    return ids


def bans_every_token(req: Req, num_outputs: int, vocab_size: int) -> bool:
    """Whether the request leaves no token to sample after its first `num_outputs` output tokens."""
    params, output_ids = req.sampling_params, req.output_ids[:num_outputs]
    banned = {*_bans_of(req, num_outputs, False), *ends_of_bad_words(params, output_ids)}
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    left = {token_id for token_id in allowed if token_id < vocab_size} - banned
    if req.grammar is not None:
        words = req.grammar.next_tokens(output_ids, vocab_size).tolist()
        left = {i for i in left if words[i // 32] >> (i % 32) & 1}
    return not left
