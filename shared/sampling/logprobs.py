"""Log-probabilities of tokens and embeddings of prompts, and their way from tensors into answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from diptych.shared.to_device import to_device
from diptych.shared.types import (
    FinishError,
    ForwardBatch,
    InputLogprobs,
    LogitsOutput,
    LogprobsOutput,
    Req,
    TokenLogprob,
)

LOGPROB_ROWS = 512
"""Prompt positions whose logits exist at once: those of a long prompt over a large vocabulary fill memory."""


def sort_descending(values: torch.Tensor, num: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, m] -> the `num` largest values of each row (default: all) and their indices, ordered by (value
    descending, index ascending). A plain stable sort: on one CPU core a row of 152,000 takes 16 ms, which
    every row that samples with top-k, top-p or min-p pays in the reference."""
    ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered[:, :num], indices[:, :num]


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, asked_ids: torch.Tensor | None = None
) -> LogprobsOutput:
    """logits [n, vocab_size], token_ids [n], asked_ids [n, m] -> log softmax (float32) at the token, at the
    `num_top` (at most vocab_size) best tokens, ordered by (logit descending, id ascending), and at asked_ids.

    A token id outside the vocabulary gets NaN."""
    logits = logits.float()
    log_normaliser = logits.logsumexp(dim=-1, keepdim=True)
    token_logprobs = logits_at(logits, token_ids[:, None]) - log_normaliser
    if num_top == 0:
        top_logits, top_ids = logits[:, :0], token_ids.new_empty(len(logits), 0)
    else:
        # By logit, not by log-probability: rounding could make two different logits equal there, and the best
        # token would not be the greedy choice.
        top_logits, top_ids = sort_descending(logits, num_top)
    if asked_ids is not None:
        top_logits = torch.cat((top_logits, logits_at(logits, asked_ids)), dim=1)
        top_ids = torch.cat((top_ids, asked_ids), dim=1)
    return LogprobsOutput(token_logprobs[:, 0], top_logits - log_normaliser, top_ids)


def ranked_logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, asked_ids: torch.Tensor | None = None
) -> InputLogprobs:
    """`logprobs_of`, and the rank of each token: one more than come before it in the order of the best."""
    own = logits_at(logits, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > own) | ((logits == own) & (ids < token_ids[:, None]))
    found = logprobs_of(logits, token_ids, num_top, asked_ids)
    return InputLogprobs(*found, is_before.sum(dim=-1) + 1)


def logits_at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits [n, vocab_size], ids [n, m] -> [n, m]; NaN for an id outside the vocabulary."""
    is_token = (ids >= 0) & (ids < logits.shape[1])
    return logits.gather(-1, ids.clamp(0, logits.shape[1] - 1)).masked_fill(~is_token, float("nan"))


def asked_input_ids(extending: Sequence[Req], device: torch.device | str) -> torch.Tensor | None:
    """`asked_ids_of` for each row of `input_logprob_rows`."""
    if not any(req.sampling_params.token_ids_logprob for req in extending):
        return None
    return asked_ids_of((req for req in extending for _ in input_logprob_positions(req)), device)


def asked_ids_of(reqs: Iterable[Req], device: torch.device | str) -> torch.Tensor | None:
    """[n, m] int64: SamplingParams.token_ids_logprob of each, -1 behind a shorter list. None: no request has
    any."""
    asked = [req.sampling_params.token_ids_logprob for req in reqs]
    longest = max(map(len, asked), default=0)
    if longest == 0:
        return None
    return to_device([[*ids, *[-1] * (longest - len(ids))] for ids in asked], torch.int64, device)


def input_logprobs_of(
    forward_batch: ForwardBatch,
    hidden_states: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    num_at_once: int = LOGPROB_ROWS,
) -> InputLogprobs:
    """The prompt log-probabilities that a batch asks for; hidden_states [num_tokens, hidden_size].
    num_at_once: rows of logits that exist together."""
    rows, ids = forward_batch.input_logprob_rows, forward_batch.input_logprob_ids
    asked = forward_batch.input_asked_ids
    assert rows is not None
    assert ids is not None
    pieces = [
        ranked_logprobs_of(
            compute_logits(hidden_states[rows[i : i + num_at_once]])[:, : forward_batch.num_token_ids],
            ids[i : i + num_at_once],
            forward_batch.num_top_input_logprobs,
            None if asked is None else asked[i : i + num_at_once],
        )
        for i in range(0, rows.shape[0], num_at_once)
    ]
    return InputLogprobs(*(torch.cat(parts) for parts in zip(*pieces)))


def to_token_logprobs(
    token_ids: Sequence[int], output: LogprobsOutput | InputLogprobs | None
) -> list[TokenLogprob]:
    """One TokenLogprob for each of the n rows, with as many alternatives as `output` has (none for None)."""
    if output is None:
        return []
    rows = zip(token_ids, output.token_logprobs.tolist())
    if output.top_ids.shape[1] == 0:
        found = [TokenLogprob(token_id, logprob) for token_id, logprob in rows]
    else:
        tops = zip(output.top_ids.tolist(), output.top_logprobs.tolist())
        found = [TokenLogprob(*row, tuple(zip(*top))) for row, top in zip(rows, tops)]
    if not isinstance(output, InputLogprobs):
        return found
    return [each._replace(rank=rank) for each, rank in zip(found, output.token_ranks.tolist())]


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
    extending: Sequence[Req], forward_batch: ForwardBatch, output: InputLogprobs | None
) -> None:
    """Hand each request what the step found about its prompt."""
    ids = forward_batch.input_logprob_ids
    token_ids = [] if output is None or ids is None else ids.tolist()
    counts = [len(input_logprob_positions(req)) for req in extending]
    distribute_input_logprobs(extending, counts, token_ids, output)


def distribute_input_logprobs(
    extending: Sequence[Req | None],
    counts: Sequence[int],
    token_ids: Sequence[int],
    output: InputLogprobs | None,
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
    """A batch carries the largest number of alternatives of its requests, and what others ask for; leave each
    its own."""
    params = req.sampling_params
    asked: tuple[tuple[int, float], ...] = ()
    if params.token_ids_logprob:
        values = dict(entry.top)
        asked = tuple((token_id, values[token_id]) for token_id in params.token_ids_logprob)
    return entry._replace(top=entry.top[: params.top_logprobs_num], asked=asked)


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
            if all(map(math.isfinite, vector)):
                req.embedding = vector
            else:
                req.to_finish = FinishError("the hidden states held NaN or infinity")
