"""Two-batch overlap: a large prefill pass is two half batches that take turns.

A rank waits for each sum over ranks. With two halves it computes one while the sum of the other is under way:

    compute   A attn 0   B attn 0   A MLP 0    B MLP 0    A attn 1   B attn 1   ...
    network              sum of A   sum of B   sum of A   sum of B   sum of A   ...

The model's code is the one that runs whole batches. Each half runs it on a thread of its own, and only one of
the two threads runs at any time: a half that has started a sum passes the turn on before it waits. All ranks
cut alike and both halves have the same operations, so all ranks call these in the same order.

A request may be cut: its second part is an extension of the first. In every layer A stores its KV before B
attends to it, because A passes the turn on later, at the sum behind attention.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch

from diptych.shared.interfaces import Collectives
from diptych.shared.interfaces.attention import AttentionBackend, BatchAttention
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.modeling.forward import run_model
from diptych.shared.to_device import to_device
from diptych.shared.types import ForwardBatch, ForwardMode

T = TypeVar("T")


class TwoBatches:
    """A `run_model` that runs large prefill passes as two halves. `beside`: a second attention backend over
    the same pools, because a backend keeps one plan at a time."""

    def __init__(self, ranks: Collectives, beside: AttentionBackend, min_tokens: int) -> None:
        self.ranks = ranks
        self.beside = beside
        self.min_tokens = max(min_tokens, 2)
        self.num_passes = 0

    def takes(self, batch: ForwardBatch) -> bool:
        """The same on all ranks, which have the same batches."""
        is_plain = batch.embeds is None and batch.custom_mask is None and batch.num_kept is None
        return batch.forward_mode.is_prefill and is_plain and batch.num_tokens >= self.min_tokens

    def __call__(
        self, model: CausalLM, batch: ForwardBatch, attention: BatchAttention, layers: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.takes(batch):
            return run_model(model, batch, attention, layers)
        self.num_passes += 1

        def half(backend: AttentionBackend, part: ForwardBatch) -> Callable[[], Any]:
            of_part = BatchAttention(backend, backend.plan(part), attention.kv_pool, part.out_cache_loc)
            return lambda: run_model(model, part, of_part, layers)

        # --8<-- [start:two-halves]
        turns = Turns()
        self.ranks.meanwhile = turns.pass_on
        try:
            a, b = halves_of(batch)
            functions = half(attention.backend, a), half(self.beside, b)
            (first, of_first), (second, of_second) = turns.run(*functions, device=batch.input_ids.device)
        finally:
            self.ranks.meanwhile = None
        hidden_states = torch.cat([first, second])
        # --8<-- [end:two-halves]
        if attention.rows is not None:
            hidden_states = hidden_states[attention.rows]
        return hidden_states, None if layers is None else torch.cat([of_first, of_second])


def halves_of(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """Cut a prefill batch into two with equally many tokens, or one more in the first."""
    middle = (batch.num_tokens + 1) // 2
    ends = list(accumulate(batch.extend_seq_lens_cpu))
    cut = bisect_left(ends, middle)  # the request of A's last token
    behind = ends[cut] - middle  # its tokens that are B's
    lens, totals = batch.extend_seq_lens_cpu, batch.seq_lens_cpu
    start = cut if behind else cut + 1
    first = [*lens[:cut], lens[cut] - behind], [*totals[:cut], totals[cut] - behind]
    second = [behind, *lens[cut + 1 :]] if behind else lens[start:], totals[start:]
    return (
        _part(batch, slice(0, middle), slice(0, cut + 1), *first),
        _part(batch, slice(middle, None), slice(start, None), *second),
    )


def _part(
    batch: ForwardBatch, tokens: slice, rows: slice, extend_seq_lens: Sequence[int], seq_lens: Sequence[int]
) -> ForwardBatch:
    device, rotated_by = batch.input_ids.device, batch.rope_positions
    lens = to_device(extend_seq_lens, torch.int64, device)
    return replace(
        batch,
        forward_mode=ForwardMode.EXTEND,
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        req_pool_indices=batch.req_pool_indices[rows],
        seq_lens=to_device(seq_lens, torch.int64, device),
        out_cache_loc=batch.out_cache_loc[tokens],
        extend_seq_lens=lens,
        extend_start_loc=lens.cumsum(0) - lens,
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(extend_seq_lens),
        rows_cpu=None if batch.rows_cpu is None else batch.rows_cpu[rows],
        input_logprob_rows=None,
        input_logprob_ids=None,
        rope_positions=None if rotated_by is None else rotated_by[..., tokens],
    )


class Turns:
    """Two functions on two threads, of which one runs at a time: the first one, until it passes the turn on
    or returns."""

    def __init__(self) -> None:
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))
        self._turn = 0
        self._has_ended = [False, False]
        self._errors: list[BaseException] = []

    def run(self, first: Callable[[], T], second: Callable[[], T], device: torch.device) -> list[T]:
        """Run both to their ends, on the device's current stream, and return what they return. An error of
        one is raised, and ends the other when it gets the turn."""
        results: list[Any] = [None, None]
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        is_inference = torch.is_inference_mode_enabled()

        def work(number: int, function: Callable[[], T]) -> None:
            try:
                if not self._errors:
                    results[number] = function()
            except BaseException as error:
                self._errors.append(error)
            self._has_ended[number] = True
            self._turn = 1 - number
            self._may_run[1 - number].release()

        def work_beside() -> None:
            self._may_run[1].acquire()
            # Both are settings of a thread.
            with torch.inference_mode(is_inference), torch.cuda.stream(stream):  # None: does nothing
                work(1, second)

        beside = threading.Thread(target=work_beside, name="second half batch", daemon=True)
        beside.start()
        work(0, first)
        beside.join()
        if self._errors:
            raise self._errors[0]
        return results

    # --8<-- [start:pass-the-turn]
    def pass_on(self) -> None:
        """Let the other function run until it passes the turn on or ends."""
        own, other = self._turn, 1 - self._turn
        if self._has_ended[other]:
            return
        self._turn = other
        self._may_run[other].release()
        self._may_run[own].acquire()
        if self._errors:
            raise RuntimeError("the other half of the batch failed")

    # --8<-- [end:pass-the-turn]
