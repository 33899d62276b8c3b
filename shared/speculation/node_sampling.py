"""Sampling at every node of a draft tree, with the parameters that the request would have had there without
speculation: its noise, its penalties, its bans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from diptych.shared.sampling.bans import ends_of_bad_words, is_banned_for_ever, set_entries
from diptych.shared.sampling.processors import group_processors
from diptych.shared.to_device import copy_to_device, to_device
from diptych.shared.types import DraftTree, Req, SamplingBatchInfo


class EarlyBans(NamedTuple):
    """Stop tokens that requests may not write yet, because of min_new_tokens."""

    banned: torch.Tensor  # [bs, vocab_size] bool, without tokens that are banned for ever
    num_left: torch.Tensor  # [bs] int64, for how many more tokens


def make_early_bans(reqs: Sequence[Req], vocab_size: int, device: torch.device | str) -> EarlyBans | None:
    """None where no request has any. The same tokens are in `SamplingBatchInfo.banned`, which says what holds
    for a request's next token only."""
    left = [_num_banned(req) for req in reqs]
    entries = [
        (row, token_id)
        for row, req in enumerate(reqs)
        for token_id in {*req.eos_token_ids, *req.sampling_params.stop_token_ids}
        if left[row] > 0 and token_id < vocab_size and not is_banned_for_ever(req.sampling_params, token_id)
    ]
    if not entries:
        return None
    banned = torch.zeros(len(reqs), vocab_size, dtype=torch.bool)
    banned[tuple(torch.tensor(entries).T)] = True
    return EarlyBans(copy_to_device(banned, device), to_device(left, torch.int64, device))


def _num_banned(req: Req) -> int:
    """Return for how many more tokens a request bans ends of sequence. A request may ask for more than it can
    get, and than 64 bits hold."""
    params = req.sampling_params
    if params.ignore_eos:
        return 0
    return max(min(params.min_new_tokens, req.max_new_tokens) - len(req.output_ids), 0)


def expand_to_nodes(
    info: SamplingBatchInfo, tree: DraftTree, early_bans: EarlyBans | None = None
) -> SamplingBatchInfo:
    """bs rows -> bs * N rows: row b * N + n is what request b asks for once node n is written.

    The root counts as written in `info` already. Penalties count a node's own way from the root as well;
    `early_bans` end at the depth where min_new_tokens is reached. Noise needs the nodes' positions
    (`DraftTree.positions`). A vocab_mask is repeated, and is right for the root: see `with_texts`.
    """
    num = tree.num_draft_tokens
    # --8<-- [start:expand-to-nodes]
    rows: dict[str, Any] = {
        field.name: value.repeat_interleave(num, dim=0)
        for field in fields(info)
        if isinstance(value := getattr(info, field.name), torch.Tensor)
    }
    if info.output_counts is not None:
        counts = rows["output_counts"].view(tree.batch_size, num, -1)
        way = tree.visible.clone()
        way[:, :, 0] = False
        ids = tree.token_ids[:, None, :].expand_as(way)
        rows["output_counts"] = counts.scatter_add(2, ids, way.to(counts.dtype)).flatten(0, 1)
    if early_bans is not None:
        is_over = tree.depths >= early_bans.num_left[:, None]
        lifted = early_bans.banned[:, None, :] & is_over[:, :, None]
        rows["banned"] = rows["banned"] & ~lifted.flatten(0, 1)
    # --8<-- [end:expand-to-nodes]
    return replace(info, **rows)


def with_texts(
    info: SamplingBatchInfo, reqs: Sequence[Req], tree: DraftTree, vocab_size: int
) -> SamplingBatchInfo:
    """`info` of nodes with what reads their texts on the CPU: a mask of the request's grammar at each node,
    its logit processor, and the ends of its bad words. `tree` may be on the CPU; else this synchronizes with
    it if there is any."""
    if not any(req.needs_output for req in reqs):
        return info
    token_ids, parents, num_nodes = tree.token_ids.tolist(), tree.parents.tolist(), tree.num_nodes.tolist()
    entries: list[tuple[Req, int, list[int]]] = []
    ends: list[tuple[int, int]] = []  # (row of a node, token) of bad words
    masks = torch.full((*tree.token_ids.shape, -(-vocab_size // 32)), -1, dtype=torch.int32)
    for row, (req, n) in enumerate(zip(reqs, num_nodes)):
        if req.finished:
            continue
        if req.grammar is not None:
            masks[row, :n] = req.grammar.next_tokens_at_nodes(
                req.output_ids, token_ids[row][:n], parents[row][:n], vocab_size
            )
        if req.logit_processor is not None or req.sampling_params.bans_sequences:
            texts = [req.output_ids]
            for node in range(1, n):
                texts.append([*texts[parents[row][node]], token_ids[row][node]])
            nodes = [(row * tree.num_draft_tokens + node, text) for node, text in enumerate(texts)]
            entries += [(req, place, text) for place, text in nodes]
            params = req.sampling_params
            ends += [(place, i) for place, text in nodes for i in ends_of_bad_words(params, text)]
    has_grammar = any(req.grammar is not None for req in reqs)
    banned, device = info.banned, info.seeds.device
    if ends:
        no_bans = torch.zeros(len(info.seeds), vocab_size, dtype=torch.bool, device=device)
        banned = no_bans if banned is None else banned.clone()
        set_entries(banned, ends, True)
    return replace(
        info,
        banned=banned,
        vocab_mask=copy_to_device(masks.flatten(0, 1), device) if has_grammar else None,
        processors=group_processors(entries),
    )
