"""N-gram drafts: runs are entered into a table in two launches, and a chain is drafted in two.

Roofline bound: a launch each. A round reads the tokens of each request once, 8 bytes each, and a few entries
of 80 bytes.

An entry's place is a hash of its namespace and its run. Several CTAs may have an entry for one place: the
first launch leaves the largest of their stamps there, and in the second one the CTA whose stamp it is writes,
so that the same tokens make the same table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, where_flag

LONGEST: tl.constexpr = tl.constexpr(8)
"""Runs have 2, 4 and 8 tokens: 2 << i."""
LENS: tl.constexpr = tl.constexpr(3)
MATCH_BLOCK = 1024
POSITIONS = 256 if INTERPRETED else 16
"""Positions of a CTA that enters runs."""


@triton.jit
def _runs_of(tokens_row, positions, namespace, multipliers_ptr, num_entries, LEN: tl.constexpr):
    """The runs of LEN tokens that end at positions [n], as int64 [n, LONGEST] with -1 before them; whether
    all their tokens exist; and their places, int64."""
    columns = tl.arange(0, LONGEST)
    each = positions[:, None] - (LONGEST - 1) + columns[None, :]
    in_run = (columns >= LONGEST - LEN)[None, :] & (each >= 0)
    runs = tl.load(tokens_row + each, mask=in_run, other=-1)
    first = tl.load(multipliers_ptr)
    mixed = tl.sum(runs * tl.load(multipliers_ptr + 1 + columns)[None, :], axis=1) + namespace * first
    mixed = (mixed ^ (mixed >> 29)) * first
    places = (mixed ^ (mixed >> 32)) % num_entries  # has the sign of its left side
    return runs, positions >= LEN - 1, tl.where(places < 0, places + num_entries, places)


@triton.jit
def _is_entry(table_ptr, namespaces_ptr, places, runs, namespace, mask, WIDTH: tl.constexpr):
    """Whether a place has the entry of the same run and namespace."""
    found = table_ptr + places[:, None] * WIDTH + tl.arange(0, LONGEST)[None, :]
    equal = tl.load(found, mask=mask[:, None], other=-2).to(tl.int64) == runs
    is_same = tl.sum(equal.to(tl.int32), axis=1) == LONGEST
    return is_same & (tl.load(namespaces_ptr + places, mask=mask, other=0) == namespace)


@triton.jit(
    do_not_specialize=["first_stamp", "num_entries", "most", "width", "stride_row"],
    do_not_specialize_on_alignment=list(range(9)),
)
def _enter_kernel(
    tokens_ptr, row_namespaces_ptr, rows_ptr, ends_ptr, new_lens_ptr, multipliers_ptr,
    table_ptr, namespaces_ptr, stamps_ptr, first_stamp: tl.int64, num_entries, most, width, stride_row,
    NUM_FOLLOWING: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = LONGEST + NUM_FOLLOWING
    request = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    num_each = tl.load(new_lens_ptr + request).to(tl.int32) + NUM_FOLLOWING - 1
    end = tl.load(ends_ptr + request).to(tl.int32)
    positions = end - num_each + numbers
    end = tl.minimum(end, width - 1)
    row = tl.load(rows_ptr + request)
    namespace = tl.load(row_namespaces_ptr + row)
    tokens_row = tokens_ptr + row * stride_row
    # Something is known behind them.
    is_entered = (numbers < num_each) & (positions >= 0) & (positions < end)
    positions = tl.where(is_entered, positions, 0)
    offs_f, offs_r = tl.arange(0, BLOCK_F), tl.arange(0, LONGEST)
    in_entry = is_entered[:, None] & (offs_f < NUM_FOLLOWING)[None, :]
    behind = positions[:, None] + 1 + offs_f[None, :]
    following = tl.load(tokens_row + behind, mask=in_entry & (behind <= end), other=-1)
    for i in tl.static_range(LENS):
        runs, is_known, places = _runs_of(
            tokens_row, positions, namespace, multipliers_ptr, num_entries, 2 << i
        )
        mask = is_entered & is_known
        stamps = first_stamp + (request * most + numbers) * LENS + i
        entries = table_ptr + places[:, None] * WIDTH
        # --8<-- [start:ngram-table-write]
        if WRITES:
            # Stamps grow with time, and of those at a place the largest one's entry is
            # written.
            mask &= tl.load(stamps_ptr + places, mask=mask, other=-1) == stamps
            tl.store(namespaces_ptr + places, tl.zeros_like(places) + namespace, mask=mask)
            tl.store(entries + offs_r[None, :], runs.to(tl.int32), mask=mask[:, None])
            is_stored = in_entry & mask[:, None]
            tl.store(entries + LONGEST + offs_f[None, :], following.to(tl.int32), mask=is_stored)
        else:
            # An entry of the same run that has more behind it stays.
            is_same = _is_entry(table_ptr, namespaces_ptr, places, runs, namespace, mask, WIDTH)
            old = tl.load(entries + LONGEST + offs_f[None, :], mask=in_entry & mask[:, None], other=-1)
            num_old = tl.sum((old >= 0).to(tl.int32), axis=1)
            has_more = num_old > tl.sum((following >= 0).to(tl.int32), axis=1)
            tl.atomic_max(stamps_ptr + places, stamps, mask=mask & ((is_same & has_more) == 0))
        # --8<-- [end:ngram-table-write]


def enter_runs(
    tokens: torch.Tensor,
    row_namespaces: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    new_lens: torch.Tensor,
    most_new: int,
    multipliers: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    first_stamp: int,
) -> int:
    """Enter the runs that end before the newest tokens of requests, at the positions `ends` [bs] of the rows
    `rows` [bs] of tokens [num_rows, width]: those of the new_lens [bs], at most most_new, last positions, and
    of the positions before them whose entries had less behind them. table: tokens [entries, LONGEST + F]
    int32, namespaces and stamps [entries] int64. -> the number of stamps."""
    table_tokens, namespaces, stamps = table
    num_following = table_tokens.shape[1] - LONGEST.value
    most = most_new + num_following - 1
    for writes in (False, True):
        _enter_kernel[(len(rows), triton.cdiv(most, POSITIONS))](
            tokens, row_namespaces, rows, ends, new_lens, multipliers, table_tokens, namespaces, stamps,
            first_stamp, len(stamps), most, tokens.shape[1], tokens.stride(0), NUM_FOLLOWING=num_following,
            BLOCK_F=triton.next_power_of_2(num_following), BLOCK_P=POSITIONS, WRITES=writes,
        )  # fmt: skip
    return len(rows) * most * LENS.value


@triton.jit(do_not_specialize=["stride_row"], do_not_specialize_on_alignment=list(range(4)))
def _match_kernel(
    tokens_ptr, rows_ptr, seq_lens_ptr, best_ptr, stride_row, BLOCK: tl.constexpr
):  # fmt: skip
    """The longest suffix that ends at one of BLOCK positions; over all blocks the maximum of length and
    position."""
    request = tl.program_id(0)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tokens_ptr + tl.load(rows_ptr + request) * stride_row
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    matches = positions < seq_len
    lens = tl.zeros([BLOCK], dtype=tl.int64)
    for back in tl.static_range(LONGEST):
        wanted = tl.load(row + tl.maximum(seq_len - back, 0))
        earlier = tl.load(row + positions - back, mask=matches & (positions >= back), other=-1)
        matches = where_flag(matches & (earlier == wanted), seq_len >= back)
        lens += matches.to(tl.int64)
    best = tl.max(tl.where(lens > 0, lens << 32 | positions.to(tl.int64), 0), axis=0)
    if best > 0:
        tl.atomic_max(best_ptr + request, best)


@triton.jit
def _longest_run(
    row, seq_len, namespace, multipliers_ptr, table_ptr, namespaces_ptr, num_entries,
    NUM_FOLLOWING: tl.constexpr,
):  # fmt: skip
    """The length of the longest run in the table with which a request ends, 0: none, and where the tokens
    that followed it are."""
    WIDTH: tl.constexpr = LONGEST + NUM_FOLLOWING
    newest = seq_len + tl.arange(0, 1)
    length, place = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    for i in tl.static_range(LENS):
        runs, is_known, places = _runs_of(row, newest, namespace, multipliers_ptr, num_entries, 2 << i)
        is_found = _is_entry(table_ptr, namespaces_ptr, places, runs, namespace, is_known, WIDTH)
        is_longer = tl.max(is_found.to(tl.int32), axis=0) > 0
        length = tl.where(is_longer, 2 << i, length)
        place = tl.where(is_longer, tl.max(places, axis=0), place)
    return length, table_ptr + place * WIDTH + LONGEST


@triton.jit(
    do_not_specialize=["num_token_ids", "num_entries", "stride_row"],
    do_not_specialize_on_alignment=list(range(11)),
)
def _draft_kernel(
    tokens_ptr, row_namespaces_ptr, rows_ptr, seq_lens_ptr, best_ptr, multipliers_ptr,
    table_ptr, namespaces_ptr, token_ids_ptr, parents_ptr, num_nodes_ptr,
    num_token_ids, num_entries, stride_row,
    HAS_TABLE: tl.constexpr, NUM_FOLLOWING: tl.constexpr, NUM_DRAFTS: tl.constexpr, NUM_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row_index = tl.load(rows_ptr + request)
    row = tokens_ptr + row_index * stride_row
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    best = tl.load(best_ptr + request)
    match_len, end = (best >> 32).to(tl.int32), best.to(tl.int32)
    steps = tl.arange(0, BLOCK)
    in_chain = steps < NUM_DRAFTS
    # --8<-- [start:ngram-lookup]
    # The tokens that followed, up to the newest token, then the same again, as for an
    # ongoing repetition.
    period = tl.maximum(seq_len - end, 1)
    drafts = tl.load(row + end + 1 + steps % period, mask=where_flag(in_chain, match_len > 0), other=-1)
    if HAS_TABLE:
        namespace = tl.load(row_namespaces_ptr + row_index)
        shared_len, behind = _longest_run(
            row, seq_len, namespace, multipliers_ptr, table_ptr, namespaces_ptr, num_entries, NUM_FOLLOWING
        )
        is_longer = shared_len > match_len  # at equal lengths the request's own
        others = tl.load(behind + steps, mask=where_flag(in_chain, is_longer), other=-1)
        drafts = tl.where(is_longer, others.to(tl.int64), drafts)
    # A prompt may have ids that cannot be drafted: they end the chain.
    is_token = (drafts >= 0) & (drafts < num_token_ids) & in_chain
    num_drafts = tl.min(tl.where(is_token, BLOCK, steps), axis=0)
    # --8<-- [end:ngram-lookup]
    is_node = steps < num_drafts
    inside = steps + 1 < NUM_NODES
    nodes = request * NUM_NODES + 1 + steps
    tl.store(token_ids_ptr + nodes, tl.where(is_node, drafts, 0), mask=inside)
    tl.store(parents_ptr + nodes, tl.where(is_node, steps, 0).to(tl.int64), mask=inside)
    tl.store(token_ids_ptr + request * NUM_NODES, tl.load(row + seq_len))
    tl.store(parents_ptr + request * NUM_NODES, 0)
    tl.store(num_nodes_ptr + request, (num_drafts + 1).to(tl.int64))


def draft_chains(
    tokens: torch.Tensor,
    row_namespaces: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    max_len: int,
    multipliers: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    num_drafts: int,
    num_nodes: int,
    num_token_ids: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chains of what followed the longest suffix of each request, its newest token at seq_lens [bs] < max_len
    of its row of tokens, in the request itself or in the table -> token ids and parents [bs, num_nodes], and
    the numbers of nodes [bs]. num_drafts < num_nodes, and at most the table's continuations."""
    assert num_drafts < num_nodes
    bs, device = len(rows), tokens.device
    token_ids, parents = torch.empty(2, bs, num_nodes, dtype=torch.int64, device=device)
    num_each, best = torch.empty(bs, dtype=torch.int64, device=device), rows.new_zeros(bs)
    if bs > 0:
        blocks = triton.cdiv(max_len, MATCH_BLOCK)
        _match_kernel[(bs, blocks)](tokens, rows, seq_lens, best, tokens.stride(0), BLOCK=MATCH_BLOCK)
        entries, namespaces = (tokens, rows) if table is None else table[:2]
        _draft_kernel[(bs,)](
            tokens, row_namespaces, rows, seq_lens, best, multipliers, entries, namespaces, token_ids,
            parents, num_each, num_token_ids, len(namespaces), tokens.stride(0), HAS_TABLE=table is not None,
            NUM_FOLLOWING=0 if table is None else entries.shape[1] - LONGEST.value, NUM_DRAFTS=num_drafts,
            NUM_NODES=num_nodes, BLOCK=triton.next_power_of_2(num_nodes), num_warps=1,
        )  # fmt: skip
    return token_ids, parents, num_each
