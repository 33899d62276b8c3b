"""Batches between their launch and the processing of their results.

The CPU forms a batch without the results in flight, launches it, and reads its results later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch

from diptych.optimized.overlap.cached_prompt import CachedPrompt
from diptych.optimized.overlap.future_map import FutureMap, count_in_flight
from diptych.optimized.overlap.streams import Pending, streams_for
from diptych.optimized.schedule_batch import make_forward_batch
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import (
    distribute_input_logprobs,
    input_logprob_positions,
    last_hidden_states,
)
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.to_device import copy_to_device
from diptych.shared.types import (
    ForwardBatch,
    InputLogprobs,
    LogitsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
    ScheduleBatch,
)

_Any = TypeVar("_Any")


@dataclass
class InFlight:
    """A batch between its launch and the processing of its results.

    `rows` shrinks: a request that is retracted or ends removes its row, and its results are dropped.
    """

    batch: ScheduleBatch
    first_place: int  # in the FutureMap, of the first row's token
    results: Pending | None = field(default=None, init=False)  # None: sampling has not begun
    rows: dict[Req, int] = field(init=False)
    prompts: dict[Req, CachedPrompt] = field(default_factory=dict, init=False)  # also of requests that left
    _kept: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.rows = {req: row for row, req in enumerate(self.batch.reqs)}

    def keep(self, value: _Any) -> _Any:
        """Keep an object that the device may read until the results have arrived."""
        self._kept.append(value)
        return value

    def place_of(self, req: Req) -> int | None:
        """Where the request's next token will be; None if this batch gives it none."""
        row = self.rows.get(req)
        return None if row is None else self.first_place + row


@dataclass
class BatchInFlight(InFlight):
    """A prefill, decode or mixed batch. (Rounds of speculation: optimized/speculative/round.py.)"""

    forward_batch: ForwardBatch
    chunked_req: Req | None  # its prompt continues, so its token has no meaning
    logits_output: LogitsOutput | None = field(default=None, init=False)  # only until it is sampled from
    _input_logprob_ids: dict[Req, list[int]] = field(init=False)  # asked for by each extending row

    def __post_init__(self) -> None:
        super().__post_init__()
        extending = self.batch.reqs[: self.batch.num_extend_reqs]
        # Stored now, because the request may be at its next chunk when results arrive.
        self._input_logprob_ids = {
            req: [req.origin_input_ids[i] for i in input_logprob_positions(req)] for req in extending
        }

    def place_of(self, req: Req) -> int | None:
        return None if req is self.chunked_req else super().place_of(req)

    def distribute_input_logprobs(self, output: InputLogprobs | None) -> None:
        ids = self._input_logprob_ids
        extending = [req if req in self.rows else None for req in ids]
        counts = [len(wanted) for wanted in ids.values()]
        distribute_input_logprobs(extending, counts, list(chain.from_iterable(ids.values())), output)


Extension = Callable[[ForwardBatch, LogitsOutput, SampleOutput], None]


class Pipeline:
    """The batches in flight, oldest first. Between two steps of the scheduler there is at most one, from
    whose tokens the next batch decodes."""

    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts
        self.device = parts.allocator.device
        self.streams = streams_for(self.device)
        # No batch has more requests than there are rows.
        self.future_map = FutureMap(parts.req_to_token_pool.size, self.device)
        self.batches: deque[InFlight] = deque()
        self._no_logits = torch.empty(0)
        # With speculation: made when a batch is launched, called when it was sampled.
        self.extension_of: Callable[[BatchInFlight], Extension] | None = None
        self._last_info: tuple[list[Req], SamplingBatchInfo] | None = None  # that can be used again

    def __len__(self) -> int:
        return len(self.batches)

    def place_of(self, req: Req) -> int | None:
        """The place of the token that the request decodes from next; None: the CPU has the token."""
        return self.batches[-1].place_of(req) if self.batches else None

    def places_of(self, reqs: Sequence[Req]) -> list[int | None]:
        if not self.batches:
            return [None] * len(reqs)
        return list(map(self.batches[-1].place_of, reqs))

    def nums_in_flight(self, reqs: Sequence[Req]) -> list[int]:
        """Tokens of each request that are sampled before the next batch, and that the CPU does not have. A
        round of speculation counts as one."""
        num_steps = self.batches[-1].batch.num_steps if self.batches else 0
        return [0 if place is None else num_steps for place in self.places_of(reqs)]

    def decodable(self, running: Sequence[Req]) -> list[Req]:
        """The requests that may produce a token beyond those in flight; an end by length is known ahead."""
        return [
            req
            for req, num_in_flight in zip(running, self.nums_in_flight(running))
            if len(req.output_ids) + num_in_flight < req.max_new_tokens
        ]

    def drop(self, req: Req) -> None:
        """Drop the results in flight of a request. The logits of its tokens in flight will not be checked for
        NaN, so their KV is not committed."""
        for batch in self.batches:
            row = batch.rows.pop(req, None)
            if isinstance(batch, BatchInFlight) and row is not None and row >= batch.batch.num_extend_reqs:
                req.kv_committed_len -= batch.batch.num_steps

    def launch(self, batch: ScheduleBatch, chunked_req: Req | None) -> None:
        parts, num_token_ids = self.parts, self.parts.num_token_ids
        places = self.places_of(batch.reqs)
        num_in_flight = self.nums_in_flight(batch.reqs)
        with parts.timeline.span("prepare"):
            first = batch.num_extend_reqs
            newest_ids = [
                req.output_ids[-1] if place is None else self.future_map.name_of(place)
                for req, place in zip(batch.reqs[first:], places[first:])
            ]
            named = make_forward_batch(batch, newest_ids, num_token_ids, self.device)
        launched = BatchInFlight(batch, self.future_map.take(batch.batch_size), named, chunked_req)
        if not parts.tree_cache.disable:
            extending = batch.reqs[: batch.num_extend_reqs]
            launched.prompts = {req: CachedPrompt.of(req, parts.tree_cache) for req in extending}
        is_pooling = any(req.is_pooling for req in batch.reqs)
        if parts.drafter is None:  # else hidden states are the drafter's
            parts.model_runner.capture_hidden = () if is_pooling else None
        if any(req.needs_output and n for req, n in zip(batch.reqs, num_in_flight)):
            self.streams.launch(lambda: self._forward(launched))
        else:
            extend = self.extension_of(launched) if self.extension_of is not None else None
            slots = copy_to_device(batch.slots_of_steps, self.device) if batch.num_steps > 1 else None
            info = self.sampling_info(batch.reqs, num_in_flight)

            def forward_and_sample() -> Any:
                resolved = launched.keep(self.future_map.resolve(named, has_ids=None in places))
                count_in_flight(launched.keep(info), named, resolved)
                if slots is not None:
                    return self._run_steps(launched, resolved, launched.keep(slots), info)
                with parts.timeline.forward(resolved):
                    outputs = parts.model_runner.forward_and_sample(
                        resolved, parts.sampler, info, num_token_ids
                    )
                if extend is not None:
                    extend(resolved, *outputs)
                return self._sampled(launched, *outputs)

            launched.results = self.streams.launch(forward_and_sample)
        self.batches.append(launched)

    def _run_steps(
        self, launched: BatchInFlight, resolved: ForwardBatch, slots: torch.Tensor, info: SamplingBatchInfo
    ) -> torch.Tensor:
        """Several decode steps: the tokens to copy to the CPU. The next batch decodes from the last ones."""
        parts = self.parts
        token_ids = parts.model_runner.decode_steps(
            resolved, slots, parts.sampler, info, parts.num_token_ids, parts.timeline.forward
        )
        self.future_map.store(launched.first_place, token_ids[-1])
        return token_ids

    def sampling_info(
        self, reqs: list[Req], num_in_flight: list[int], reads_texts: bool = True
    ) -> SamplingBatchInfo:
        """The sampling info of the batch; that of the previous batch if the requests are the same and nothing
        depends on their outputs."""
        if self._last_info is not None and self._last_info[0] == reqs:
            return self._last_info[1]
        info = make_sampling_batch_info(
            reqs, self.parts.num_token_ids, self.device, num_in_flight, reads_texts
        )
        changes = info.banned is not None or info.output_counts is not None
        changes |= any(req.needs_output for req in reqs)
        # min_new_tokens: for a request that loses its tokens in flight, a ban that had ended applies again.
        may_change = changes or any(req.sampling_params.min_new_tokens for req in reqs)
        self._last_info = None if may_change else (reqs, info)
        return info

    def _forward(self, launched: BatchInFlight) -> None:
        """Run the model without sampling, because a grammar or processor reads the
        previous token."""
        resolved = launched.keep(self.future_map.resolve(launched.forward_batch))
        with self.parts.timeline.forward(resolved):
            launched.logits_output = self.parts.model_runner.forward(resolved)

    # --8<-- [start:sample-late]
    def sample(self, launched: BatchInFlight) -> None:
        """Sample, after all previous tokens are known. The logits are valid until the
        next forward pass."""
        parts, num_token_ids = self.parts, self.parts.num_token_ids
        info = make_sampling_batch_info(launched.batch.reqs, num_token_ids, self.device)

        def sample() -> tuple[LogitsOutput, SampleOutput]:
            logits_output, launched.logits_output = launched.logits_output, None
            assert logits_output is not None
            logits = logits_output.next_token_logits[:, :num_token_ids]
            positions = launched.forward_batch.seq_lens - 1
            sample_output = parts.sampler.sample(logits, launched.keep(info), positions)
            return self._sampled(launched, logits_output, sample_output)

        launched.results = self.streams.launch(sample)

    # --8<-- [end:sample-late]

    def _sampled(
        self, launched: BatchInFlight, logits_output: LogitsOutput, sample_output: SampleOutput
    ) -> tuple[LogitsOutput, SampleOutput]:
        """The results to copy to the CPU, without the logits. The tokens stay on the device as well."""
        self.future_map.store(launched.first_place, sample_output.next_token_ids)
        states = None
        if any(req.is_pooling for req in launched.batch.reqs):
            states = last_hidden_states(launched.forward_batch, logits_output)
        return LogitsOutput(self._no_logits, logits_output.input_logprobs, states), sample_output
