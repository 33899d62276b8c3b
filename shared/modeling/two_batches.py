"""Two-batch overlap: a large prefill pass is two half batches that take turns.

A rank waits for each sum over ranks. With two halves it computes one while the sum of the other is under way:

    compute   A attn 0   B attn 0   A MLP 0    B MLP 0    A attn 1   B attn 1   ...
    network              sum of A   sum of B   sum of A   sum of B   sum of A   ...

The model's code is the one that runs whole batches. Each half runs it on a thread of its own, and only one of
the two threads runs at any time: a half that has started a sum passes the turn on before it waits
(`diptych.shared.parallel.turns`). All ranks cut alike and both halves have the same operations, so all ranks
call these in the same order.

A request may be cut: its second part is an extension of the first. In every layer A stores its KV before B
attends to it, because A passes the turn on later, at the first operation behind attention.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from diptych.shared.interfaces.attention import AttentionBackend, BatchAttention
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.modeling.forward import run_model
from diptych.shared.types import ForwardBatch, ForwardMode


class TwoBatches:
    """A `run_model` that runs the passes that `takes` names as two halves. `in_turns` runs two functions in
    turns. `take_part`: what a half without tokens does."""

    def __init__(
        self,
        takes: Callable[[ForwardBatch], bool],
        in_turns: Callable[[Callable[[], Any], Callable[[], Any], torch.device], list[Any]],
        take_part: Callable[[CausalLM], None] | None = None,
    ) -> None:
        self.takes = takes
        self.in_turns = in_turns
        self.take_part = take_part
        self.num_passes = 0
        self._beside: AttentionBackend | None = None

    def __call__(
        self, model: CausalLM, batch: ForwardBatch, attention: BatchAttention, layers: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.takes(batch):
            return run_model(model, batch, attention, layers)
        self.num_passes += 1
        if self._beside is None:  # made here, because a backend may be chosen when an engine is complete
            self._beside = attention.backend.beside()

        # --8<-- [start:two-halves]
        def half(backend: AttentionBackend, part: ForwardBatch) -> Callable[[], Any]:
            if part.num_tokens == 0:
                return partial(self._no_tokens, model)
            plan = backend.plan(part)
            own = BatchAttention(backend, plan, attention.kv_pool, part.out_cache_loc)
            return partial(run_model, model, part, own, layers)

        a, b = halves_of(batch)
        functions = half(attention.backend, a), half(self._beside, b)
        found = self.in_turns(*functions, batch.input_ids.device)
        # --8<-- [end:two-halves]
        parts, captured = zip(*(half for half in found if half is not None))
        hidden_states = torch.cat(parts)
        if attention.rows is not None:
            hidden_states = hidden_states[attention.rows]
        return hidden_states, None if layers is None else torch.cat(captured)

    def _no_tokens(self, model: CausalLM) -> None:
        assert self.take_part is not None, "only ranks with batches of their own have halves without tokens"
        self.take_part(model)


def halves_of(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """Cut a batch into two with equally many tokens, or one more in the first. Every request extends, by one
    token if it decodes."""
    middle = (batch.num_tokens + 1) // 2
    ends = list(accumulate(batch.extend_seq_lens_cpu))
    cut = bisect_left(ends, middle)  # the request of A's last token
    behind = ends[cut] - middle  # its tokens that are B's
    start = cut if behind else cut + 1
    before = batch.extend_seq_lens_cpu[cut] - behind if behind else 0
    return (
        _part(batch, slice(0, middle), slice(0, cut + 1), -1, behind, ends_later=True),
        _part(batch, slice(middle, None), slice(start, None), 0, before, ends_later=False),
    )


def _part(
    batch: ForwardBatch, tokens: slice, rows: slice, cut: int, num_others: int, ends_later: bool
) -> ForwardBatch:
    """The tokens of these requests, of which the one at `cut` has `num_others` in the other half."""
    lens, totals = batch.extend_seq_lens[rows].clone(), batch.seq_lens[rows].clone()
    lens_cpu, totals_cpu = list(batch.extend_seq_lens_cpu[rows]), list(batch.seq_lens_cpu[rows])
    if num_others:
        lens[cut] -= num_others
        lens_cpu[cut] -= num_others
        if ends_later:
            totals[cut] -= num_others
            totals_cpu[cut] -= num_others
    rotated_by = batch.rope_positions
    return replace(
        batch,
        forward_mode=ForwardMode.EXTEND,
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        req_pool_indices=batch.req_pool_indices[rows],
        seq_lens=totals,
        out_cache_loc=batch.out_cache_loc[tokens],
        extend_seq_lens=lens,
        extend_start_loc=lens.cumsum(0) - lens,
        seq_lens_cpu=tuple(totals_cpu),
        extend_seq_lens_cpu=tuple(lens_cpu),
        rows_cpu=None if batch.rows_cpu is None else batch.rows_cpu[rows],
        input_logprob_rows=None,
        input_logprob_ids=None,
        rope_positions=None if rotated_by is None else rotated_by[..., tokens],
    )
