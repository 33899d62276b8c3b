"""Log-probabilities of a prompt's tokens: which rows of a step give them, and to whom they belong.

The logits of position t - 1 tell about token t; nothing tells about token 0. A prompt computed in chunks gets
its own piece by piece, and what is known survives a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.logprobs import to_token_logprobs
from shared.types import ForwardBatch, LogprobsOutput, Req, TokenLogprob


def input_logprob_positions(req: Req) -> range:
    """Prompt positions whose log-probability this extension (fill_ids behind prefix_indices) gives."""
    first = req.next_input_logprob
    if first is None:
        return range(0)
    prefix_len = len(req.prefix_indices)
    return range(max(first, 1, prefix_len + 1), min(len(req.fill_ids) + 1, len(req.origin_input_ids)))


def input_logprob_rows(extending: Sequence[Req], start_locs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows of the batch, and for each the token whose log-probability is wanted there."""
    rows: list[int] = []
    ids: list[int] = []
    for req, start_loc in zip(extending, start_locs):
        positions = input_logprob_positions(req)
        prefix_len = len(req.prefix_indices)
        rows += [start_loc + position - 1 - prefix_len for position in positions]
        ids += [req.origin_input_ids[position] for position in positions]
    return rows, ids


def collect_input_logprobs(
    extending: Sequence[Req], forward_batch: ForwardBatch, output: LogprobsOutput | None
) -> None:
    """Hand each request what the step found about its prompt."""
    token_ids = [] if output is None else forward_batch.input_logprob_ids.tolist()
    counts = [len(input_logprob_positions(req)) for req in extending]
    hand_out_input_logprobs(extending, counts, token_ids, output)


def hand_out_input_logprobs(
    extending: Sequence[Req | None],
    counts: Sequence[int],
    token_ids: Sequence[int],
    output: LogprobsOutput | None,
) -> None:
    """The first counts[0] of what was found are the first request's, and so on; None: it left meanwhile."""
    found = to_token_logprobs(token_ids, output)
    start = 0
    for req, num_found in zip(extending, counts):
        if req is not None and req.next_input_logprob == 0:
            req.input_logprobs.append(TokenLogprob(req.origin_input_ids[0], None))
        if req is not None:
            req.input_logprobs += [cut_top(entry, req) for entry in found[start : start + num_found]]
        start += num_found
    assert start == len(found)


def cut_top(entry: TokenLogprob, req: Req) -> TokenLogprob:
    """A batch carries as many alternatives as its greediest request wants; give each what it asked for."""
    return entry._replace(top=entry.top[: req.sampling_params.top_logprobs_num])
