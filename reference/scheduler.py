"""The main loop. Each step chooses a batch, runs it and processes its results; requests join and leave
between two steps (continuous batching).

What is not the loop (how a request comes, ends and is counted) is in shared/scheduling/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from diptych.reference.decoding import PlainDecoding
from diptych.reference.schedule_batch import prepare_for_extend
from diptych.reference.speculative.speculative_decoding import SpeculativeDecoding
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import (
    AddReqResult,
    PrefillAdder,
    PrefillBudget,
    RadixKey,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
)
from diptych.shared.interfaces import scheduler as interface
from diptych.shared.scheduling.admission import NewTokenRatio
from diptych.shared.scheduling.lifecycle import Lifecycle
from diptych.shared.scheduling.pages import mix, retraction_order
from diptych.shared.scheduling.stop_conditions import held_nan
from diptych.shared.types import BatchResult, Req, ScheduleBatch, StepOutput


class Scheduler(interface.Scheduler):
    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        self.config = config
        self.parts = parts
        self.decoding: PlainDecoding = (
            PlainDecoding(parts)
            if parts.drafter is None
            else SpeculativeDecoding(config, config.context_len or model_config.context_len, parts)
        )
        self.requests = Lifecycle(config, model_config, parts, self.decoding, waiting_queue=[])
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)

    def add_request(self, req: Req) -> None:
        self.requests.add(req)

    def add_computed(self, req: Req, first: StepOutput, draft_state: bytes = b"") -> None:
        self.requests.add_computed(req, first, draft_state)

    def abort(self, rid: str) -> bool:
        return self.requests.abort(rid)

    def retract(self, rid: str) -> bool:
        return self.requests.retract_by_id(rid)

    def has_work(self) -> bool:
        return bool(self.requests.live or self.requests.outputs)

    # --8<-- [start:scheduler-step]
    def step(self) -> list[StepOutput]:
        requests = self.requests
        requests.finish_overdue()
        with self._errors_end(None):
            batch = self.get_next_batch_to_run()
        if batch is not None:
            requests.num_steps += batch.num_steps
            with self._errors_end(batch):
                result = self.decoding.run(batch, requests.chunked_req)
                self.process_batch_result(batch, result)
        if not requests.live:
            self.new_token_ratio.current = self.new_token_ratio.initial
        return requests.take_outputs()

    # --8<-- [end:scheduler-step]

    @contextmanager
    def _errors_end(self, batch: ScheduleBatch | None) -> Iterator[None]:
        """An exception ends the requests of the batch, and no others. While a batch is chosen (None) there is
        none yet: the exception is raised again."""
        try:
            with self.parts.timeline.span("schedule") if batch is None else nullcontext():
                yield
        except BaseException as error:
            if batch is None:
                self.requests.abandon(error)
                raise
            self.requests.finish_with_error(batch.reqs, error)

    # ---- choose the batch ----

    # --8<-- [start:get-next-batch]
    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prefill first: waiting costs latency, and a larger running batch is efficient."""
        prefill = self.get_new_batch_prefill()
        if prefill is None:
            return self.get_batch_decode()
        decodable = self.requests.running if self.config.enable_mixed_chunk else []
        decode = self.decoding.prepare(decodable) if decodable else None
        return prefill if decode is None else mix(prefill, decode)

    # --8<-- [end:get-next-batch]

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """The prompt that was computed in part, and the waiting requests that fit."""
        config, parts, requests = self.config, self.parts, self.requests
        if requests.chunked_req is None and (requests.batch_is_full or not requests.waiting_queue):
            return None
        running = requests.running
        budget = PrefillBudget(
            page_size=config.page_size,
            max_prefill_tokens=config.max_prefill_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            new_token_ratio=self.new_token_ratio.current,
            num_mixed_decode_tokens=len(running) if config.enable_mixed_chunk else 0,
            num_reserved_tokens=sum(each.num_reserved(running) for each in requests.features),
            in_batch_prefix_threshold=config.in_batch_prefix_deprioritize_threshold,
        )
        adder = parts.prefill_adder(budget, parts.tree_cache, parts.allocator, running)
        if requests.chunked_req is not None:
            requests.chunked_req = adder.add_chunked_req(requests.chunked_req)
        if requests.chunked_req is None and not requests.batch_is_full:
            self._admit_waiting(adder)
        new = adder.can_run_list
        if not new:
            return None
        requests.have_started(new)
        if adder.new_chunked_req is not None:
            requests.chunked_req = adder.new_chunked_req
        batch = prepare_for_extend(new, parts)
        for each in requests.features:
            each.have_joined(new, requests.running)
        return batch

    def _admit_waiting(self, adder: PrefillAdder) -> None:
        requests, features = self.requests, self.requests.features
        order, deprioritized = self.parts.policy.order(requests.waiting_queue, requests.running)
        for req in order:
            if req.rid in deprioritized and adder.can_run_list:
                break  # one step later it finds its prefix in the cache
            if not all(each.may_join(req, requests.running, adder.can_run_list) for each in features):
                break
            if len(requests.running) + len(adder.can_run_list) >= self.config.max_running_requests:
                result = AddReqResult.NO_TOKEN
            else:
                for each in features:
                    each.is_joining(req)
                result = adder.add_one_req(req)
            if result is AddReqResult.WAIT:
                continue
            if result is AddReqResult.NO_TOKEN and any(each.makes_room(req, adder) for each in features):
                result = adder.add_one_req(req)
            if result is not AddReqResult.CONTINUE:
                # After an addition it is worth another try: the next step's budget reserves for what was
                # added now only the expected output, not the longest.
                has_no_room = result is AddReqResult.NO_TOKEN and not adder.can_run_list
                requests.batch_is_full = has_no_room and bool(requests.running)
                break
            requests.waiting_queue.remove(req)
            if adder.new_chunked_req is not None:
                break

    def get_batch_decode(self) -> ScheduleBatch | None:
        """A decode step of all running requests, or several, after retractions if memory is short."""
        if not self.requests.running:
            return None
        batch = self.decoding.prepare(self.requests.running, self.config.num_continuous_decode_steps)
        if batch is None:
            return self._retract_to_decode()
        self.new_token_ratio.decay()
        return batch

    def _retract_to_decode(self) -> ScheduleBatch:
        """Retract requests until the others can decode. The last one stays: a chunked prompt is retracted
        before it, and alone it fits, because submission checked that."""
        requests = self.requests
        candidates = retraction_order(requests.running)
        while (batch := self.decoding.prepare(requests.running)) is None:
            if len(candidates) > 1:
                requests.retract(candidates.pop())
            else:
                assert requests.chunked_req is not None, (
                    "one request alone does not fit: submission checks this"
                )
                requests.retract(requests.chunked_req)
        self.new_token_ratio.raise_after_retraction(requests.running)
        return batch

    # ---- process its results ----

    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        requests, tree_cache = self.requests, self.parts.tree_cache
        with self.parts.timeline.span("process results"):
            # --8<-- [start:process-batch-result]
            for i, (req, tokens) in enumerate(zip(batch.reqs, result.tokens)):
                if req is requests.chunked_req:  # its prompt is not complete: the token has no meaning
                    tree_cache.cache_unfinished_req(req)
                    continue
                requests.append_tokens(req, *tokens)
                if not req.finished and i < batch.num_extend_reqs:
                    tree_cache.cache_unfinished_req(req)
                    requests.running.append(req)
                # --8<-- [end:process-batch-result]
            for req, token_ids in zip(batch.reqs[: batch.num_extend_reqs], result.token_ids):
                has_no_token = req.finished and token_ids and token_ids[0] < 0
                if has_no_token and held_nan(req, self.parts.num_token_ids):
                    self._discard(req)

    # --8<-- [start:discard-a-prompt]
    def _discard(self, req: Req) -> None:
        """Discard the KV of a request whose logits were NaN. The KV of its earlier
        chunks, which are cached, may be NaN too."""
        key_ids = req.key_ids[: len(req.fill_ids)]
        key = RadixKey(key_ids, req.extra_key, self.parts.tree_cache.is_bigram)
        self.parts.tree_cache.discard(key, req.kv_matched_len)
        # --8<-- [end:discard-a-prompt]

    # ---- inspection ----

    def flush_cache(self) -> bool:
        return self.requests.flush_cache()

    def forget_kv(self) -> list[StepOutput]:
        return self.requests.forget_kv()

    def state(self) -> SchedulerState:
        return self.requests.state()

    def stats(self) -> SchedulerStats:
        return self.requests.stats(self.new_token_ratio.current)
