"""Pipeline parallelism: each rank has some of the layers, and several micro-batches are in flight.

Differs from reference: a stage queues its layers, from CUDA graphs where the model runner has them, and its
messages, which go from GPU to GPU, and waits for neither. A micro-batch decodes from tokens that exist on the
devices only: it is launched while the batch that samples them is still being computed, so one batch more than
stages is in flight, and the first stage goes from batch to batch without waiting for the CPU. The next chunk
of a prompt follows at once, and micro-batches may be mixed. Loses one row of work for a request that a stop
token ends. A request with a grammar joins a micro-batch when the CPU knows its tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from diptych.optimized.overlap.cached_prompt import CachedPrompt
from diptych.optimized.overlap.future_map import FutureMap, count_in_flight
from diptych.optimized.overlap.in_flight import BatchInFlight, Pipeline
from diptych.optimized.overlap.streams import Pending, streams_for
from diptych.optimized.parallel.stage_messages import Coming, StageMessages, connect
from diptych.optimized.parallel.stage_model import Entry, NoSampler, StageModel
from diptych.optimized.schedule_batch import make_forward_batch
from diptych.optimized.scheduler import Scheduler
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import (
    CausalLM,
    Collectives,
    ModelRunner,
    RunnerFeatures,
    SchedulerParts,
    TokenToKVPool,
)
from diptych.shared.scheduling.pages import mix
from diptych.shared.types import (
    ForwardBatch,
    InputLogprobs,
    LogitsOutput,
    LogprobsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
    ScheduleBatch,
    StepOutput,
)

NO_LOGITS = torch.empty(0)
NUM_OWN = len(LogprobsOutput._fields)


class Stage:
    """The layers of one rank. `ranks`: all stages, in the order of the layers."""

    def __init__(self, runner: ModelRunner, ranks: Collectives, messages: StageMessages) -> None:
        """`runner`: over a `StageModel`."""
        self.runner: Any = runner
        self.ranks = ranks
        self.is_first = ranks.rank == 0
        self.is_last = ranks.rank == ranks.size - 1
        self.streams = streams_for(messages.device)
        self.messages = messages
        self._unfinished: deque[Pending | Coming] = deque()  # results of launches

    @torch.inference_mode()
    def launch(self, batch: Launched, info: SamplingBatchInfo, parts: SchedulerParts) -> None:
        """Queue this rank's layers. `finish` returns the results, in order of launches."""
        queued = self.streams.launch(lambda: self._run(batch, info, parts))
        if not self.is_last:
            batch.coming = self.messages.receive_results(batch.batch.batch_size, batch.has_rest, batch.store)
        self._unfinished.append(batch.coming or queued)

    # --8<-- [start:stage-launch]
    def _run(self, batch: Launched, info: SamplingBatchInfo, parts: SchedulerParts) -> Any:
        """Receive, compute, and send or sample. Returns what the CPU gets."""
        resolved = batch.forward_batch  # with names, which other stages do not read
        if not self.is_first:
            hidden_states = self._receive(resolved.num_tokens)
            self.runner.model.entry.load(batch.keep(hidden_states))
        if self.is_first or self.is_last:
            resolved = batch.keep(batch.resolve())
        with parts.timeline.forward(resolved):
            if self.is_last:
                return self._sample(batch, resolved, info, parts)
            x = self.runner.forward(resolved).hidden_states
        self._send(x.clone(), self.ranks.rank + 1)  # the next batch overwrites x
        return None

    # --8<-- [end:stage-launch]

    def _sample(
        self, batch: Launched, resolved: ForwardBatch, info: SamplingBatchInfo, parts: SchedulerParts
    ) -> tuple[torch.Tensor | None, ...]:
        count_in_flight(batch.keep(info), batch.forward_batch, resolved)
        logits_output, sampled = self.runner.forward_and_sample(
            resolved, parts.sampler, info, parts.num_token_ids
        )
        batch.store(sampled.next_token_ids)
        own, found = sampled.logprobs, logits_output.input_logprobs
        results = (sampled.next_token_ids, *(own or [None] * NUM_OWN), *(found or ()))
        self.messages.send_tokens(results)
        return results

    def finish(self) -> tuple[SampleOutput, InputLogprobs | None]:
        """Tokens and prompt log-probabilities of the oldest unfinished batch."""
        results: Any = self._unfinished[0].wait()
        self._unfinished.popleft()
        if self.is_last:
            self.messages.send_rest(results)
        own, found = results[1 : NUM_OWN + 1], results[NUM_OWN + 1 :]
        logprobs = LogprobsOutput(*own) if own and own[0] is not None else None
        return SampleOutput(results[0], logprobs), InputLogprobs(*found) if found else None

    def _receive(self, num_tokens: int) -> torch.Tensor:
        """Hidden states from the stage before."""
        model = self.runner.model
        return self.messages.receive_hidden(num_tokens, next(model.parameters()), model.config.hidden_size)

    def _send(self, x: torch.Tensor, to: int) -> None:
        """Send without waiting, because the receiver may still compute."""
        self.messages.send_hidden(x, to)


@dataclass(eq=False)
class Launched(BatchInFlight):
    """A micro-batch in flight. `sources`: the results that have the tokens it decodes from."""

    future_map: FutureMap
    sources: list[Coming]
    has_ids: bool  # the CPU has some of these tokens
    has_rest: bool  # its results have log-probabilities
    coming: Coming | None = field(default=None, init=False)  # its results, except on the last stage

    def resolve(self) -> ForwardBatch:
        """The batch with tokens in place of names. Afterwards it keeps no batch before it."""
        while self.sources:
            self.sources.pop().arrive()
        return self.future_map.resolve(self.forward_batch, self.has_ids)

    def store(self, token_ids: torch.Tensor) -> None:
        self.future_map.store(self.first_place, token_ids)


class PipelineScheduler(Scheduler):
    """Keeps one batch more in flight than there are stages. A request is in two of them at most: the second
    decodes from the token of the first."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts, stage: Stage
    ) -> None:
        super().__init__(config, model_config, parts)
        self.stage = stage
        self.stages = StagesInFlight(parts, stage)
        self.pipeline = self.decoding.pipeline = self.stages
        self.under_way = self.stages.batches
        self.num_ahead = stage.ranks.size if self.overlaps else stage.ranks.size - 1

    # --8<-- [start:pipeline-step]
    def step(self) -> list[StepOutput]:
        requests = self.requests
        requests.finish_overdue()
        self._catch_up(num_left=self.num_ahead)
        try:
            with self.parts.timeline.span("schedule"):
                batch = self.get_next_batch_to_run()
        except BaseException as error:
            requests.abandon(error)
            raise
        is_launched = batch is not None and self._launch(batch)
        self._catch_up(num_left=self.num_ahead if is_launched else max(len(self.under_way) - 1, 0))
        if not requests.live:
            self._catch_up(num_left=0)
            self.new_token_ratio.current = self.new_token_ratio.initial
        return requests.take_outputs()

    # --8<-- [end:pipeline-step]

    def has_work(self) -> bool:
        return super().has_work() or bool(self.under_way)

    def flush_cache(self) -> bool:
        return not self.under_way and super().flush_cache()

    def forget_kv(self) -> list[StepOutput]:
        raise ValueError("pipelines keep batches of several steps in flight and do not forget KV")

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        """The other stages have launched the batch and wait for this one: the engine ends."""
        raise error

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        prefill = self.get_new_batch_prefill()
        if prefill is None:
            return self.get_batch_decode()
        ready = self._ready() if self.config.enable_mixed_chunk else []
        decode = self.decoding.prepare(ready) if ready else None
        return prefill if decode is None else mix(prefill, decode)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """The next chunk of a prompt does not wait: on each rank it runs after the one before."""
        return super().get_new_batch_prefill()

    def get_batch_decode(self) -> ScheduleBatch | None:
        ready = self._ready()
        if not ready:
            return None
        batch = self.decoding.prepare(ready)
        if batch is None and not self.under_way:
            return self._retract_to_decode()  # otherwise batches that end may free memory
        if batch is not None:
            self.new_token_ratio.decay()
        return batch

    def _ready(self) -> list[Req]:
        return self.stages.ready(self._decodable(), self.overlaps)


class StagesInFlight(Pipeline):
    """The batches in flight of all stages, oldest first."""

    def __init__(self, parts: SchedulerParts, stage: Stage) -> None:
        super().__init__(parts)
        self.stage = stage
        self.streams = stage.streams
        max_bs = parts.req_to_token_pool.size
        self.future_map = FutureMap(max_bs, self.device, limit=(stage.ranks.size + 3) * max_bs)
        self._infos: deque[tuple[list[Req], SamplingBatchInfo]] = deque(maxlen=stage.ranks.size + 1)

    def place_of(self, req: Req) -> int | None:
        places = (each.place_of(req) for each in reversed(self.batches))
        return next((place for place in places if place is not None), None)

    def places_of(self, reqs: Sequence[Req]) -> list[int | None]:
        return list(map(self.place_of, reqs))

    def num_in_flight(self) -> Counter[Req]:
        """Tokens of each request that the CPU does not have yet."""
        return Counter(req for each in self.batches for req in each.rows if each.place_of(req) is not None)

    def decodable(self, running: Sequence[Req]) -> list[Req]:
        ahead = self.num_in_flight()
        return [req for req in running if len(req.output_ids) + ahead[req] < req.max_new_tokens]

    def ready(self, decodable: Sequence[Req], runs_ahead: bool) -> list[Req]:
        """The next micro-batch: one of as many as there are stages, so that all ranks are
        busy. Its requests are not in the newest batches, if there are others."""
        num_stages, ahead = self.stage.ranks.size, self.num_in_flight()
        ready = [req for req in decodable if ahead[req] <= int(runs_ahead and not req.needs_output)]
        newest = {req for each in list(self.batches)[1 - num_stages :] for req in each.rows}
        waiting = [req for req in ready if req not in newest]
        return (waiting or ready)[: -(-len(decodable) // num_stages)]

    def sampling_info(
        self, reqs: list[Req], num_in_flight: list[int], reads_texts: bool = True
    ) -> SamplingBatchInfo:
        """Micro-batches take turns, so that of each is kept."""
        self._last_info = next((each for each in self._infos if each[0] == reqs), None)
        info = super().sampling_info(reqs, num_in_flight, reads_texts)
        if self._last_info is not None and all(each[1] is not info for each in self._infos):
            self._infos.append(self._last_info)
        return info

    def launch(self, batch: ScheduleBatch, chunked_req: Req | None) -> None:
        parts, first = self.parts, batch.num_extend_reqs
        places = self.places_of(batch.reqs)
        with parts.timeline.span("prepare"):
            newest_ids = [
                req.output_ids[-1] if place is None else self.future_map.name_of(place)
                for req, place in zip(batch.reqs[first:], places[first:])
            ]
            named = make_forward_batch(batch, newest_ids, parts.num_token_ids, self.device)
        info: Any = None  # of the last stage
        if self.stage.is_last:
            info = self.sampling_info(batch.reqs, [int(place is not None) for place in places])
        asks = any(req.sampling_params.return_logprob for req in batch.reqs)
        launched = Launched(
            batch,
            self.future_map.take(batch.batch_size),
            named,
            chunked_req,
            self.future_map,
            self._sources(batch.reqs[first:]),
            has_ids=None in places,
            has_rest=asks or named.input_logprob_rows is not None,
        )
        if not parts.tree_cache.disable:
            launched.prompts = {req: CachedPrompt.of(req, parts.tree_cache) for req in batch.reqs[:first]}
        launched.results = OfLastStage(self.stage)
        self.stage.launch(launched, info, parts)
        self.batches.append(launched)

    def _sources(self, reqs: Sequence[Req]) -> list[Coming]:
        """The results that have the tokens which these requests decode from, on the first stage, the only one
        that waits for them."""
        if not self.stage.is_first:
            return []
        return [
            each.coming
            for each in self.batches
            if isinstance(each, Launched) and each.coming and any(each.place_of(req) for req in reqs)
        ]


class OfLastStage(Pending):
    """The results of the oldest unfinished batch of a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def wait(self) -> tuple[LogitsOutput, SampleOutput]:
        sampled, input_logprobs = self.stage.finish()
        return LogitsOutput(NO_LOGITS, input_logprobs), sampled


def implementation(component: str, impl: Any, config: EngineConfig, ranks: Collectives) -> Any:
    """What a stage has in place of an implementation of a component."""
    is_first, is_last = ranks.rank == 0, ranks.rank == ranks.size - 1

    def runner(model: CausalLM, attention: Any, kv_pool: TokenToKVPool, features: RunnerFeatures) -> Any:
        entry = None if is_first else Entry(config, model)
        captured = features.capture_hidden if is_last else ()
        return impl(
            StageModel(model, entry, is_last), attention, kv_pool, replace(features, capture_hidden=captured)
        )

    def scheduler(config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> Scheduler:
        messages = connect(ranks, parts.allocator.device)
        return PipelineScheduler(config, model_config, parts, Stage(parts.model_runner, ranks, messages))

    changed = {"model_runner": runner, "scheduler": scheduler} | ({} if is_last else {"sampler": NoSampler})
    return changed.get(component, impl)
