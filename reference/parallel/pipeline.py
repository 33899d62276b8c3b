"""Pipeline parallelism: each rank has some of the layers, and several micro-batches are in flight.

Every rank runs the same scheduler. Launching a batch computes this rank's layers: the first rank embeds the
tokens, every rank sends the hidden states to the next, and the last one samples and sends the tokens to all.
So a rank knows the tokens of a batch only after the last rank has computed it. Until then it launches batches
of other requests. With as many batches as stages, all ranks are busy. Each rank makes the same decisions, at
different times. A rank's own launches are in order, so memory may be freed as soon as the scheduler decides:
earlier launches have already been computed on this rank. Messages go through the memory of the CPU: they are
few and small, and any network carries them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from diptych.reference.schedule_batch import make_forward_batch
from diptych.reference.scheduler import Scheduler
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import Collectives, ModelRunner, SchedulerParts
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.parallel.tensor_frames import pack, unpack
from diptych.shared.sampling.logprobs import (
    distribute_input_logprobs,
    input_logprob_positions,
    input_logprobs_of,
    to_token_logprobs,
)
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.stop_conditions import held_nan
from diptych.shared.types import (
    ForwardBatch,
    InputLogprobs,
    LogprobsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
    ScheduleBatch,
    StepOutput,
)

_Any = TypeVar("_Any")

MAX_RESULT_BYTES = 2**30
"""Of the tokens and log-probabilities of one batch."""
NO_LOGPROBS = (None,) * len(LogprobsOutput._fields)
NO_INPUT_LOGPROBS = (None,) * len(InputLogprobs._fields)


class Stage:
    """The layers of one rank. `ranks`: all stages, in the order of the layers."""

    def __init__(self, runner: ModelRunner, ranks: Collectives) -> None:
        self.model = runner.model
        self.attention = runner.attention
        self.kv_pool = runner.kv_pool
        self.ranks: Any = ranks
        self.is_first = ranks.rank == 0
        self.is_last = ranks.rank == ranks.size - 1
        self._results: deque[bytes] = deque()  # of the last stage
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()  # on their way: not to be overwritten

    # --8<-- [start:stage-launch]
    @torch.inference_mode()
    def launch(self, batch: ForwardBatch, info: SamplingBatchInfo, parts: SchedulerParts) -> None:
        """Compute this rank's layers. `finish` returns the results, in order of
        launches."""
        model: Any = self.model.model
        plan = self.attention.plan(batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, batch.out_cache_loc)
        x = self.model.embed(batch.input_ids) if self.is_first else self._receive(batch.num_tokens)
        for layer in model.layers:
            x = layer(x, batch.positions, attention)
        if self.is_last:
            self._sample(model.norm(x), batch, info, parts)
        else:
            self._send(x.cpu(), self.ranks.rank + 1)

    # --8<-- [end:stage-launch]

    def _sample(
        self, x: torch.Tensor, batch: ForwardBatch, info: SamplingBatchInfo, parts: SchedulerParts
    ) -> None:
        logits = self.model.compute_logits(x[batch.last_token_rows])[:, : parts.num_token_ids]
        output = parts.sampler.sample(logits, info, batch.sampled_positions)
        found = None
        if batch.input_logprob_rows is not None:
            found = input_logprobs_of(batch, x, self.model.compute_logits)
        tensors = (output.next_token_ids, *(output.logprobs or NO_LOGPROBS), *(found or NO_INPUT_LOGPROBS))
        result = pack([None if x is None else x.cpu() for x in tensors])
        self._results.append(result)
        for rank in range(self.ranks.size - 1):
            self._send(torch.tensor([len(result)]), rank)
            self._send(torch.frombuffer(bytearray(result), dtype=torch.uint8), rank)

    def finish(self) -> tuple[SampleOutput, InputLogprobs | None]:
        """Tokens and prompt log-probabilities of the oldest unfinished batch."""
        if self.is_last:
            result = self._results.popleft()
        else:
            last = self.ranks.size - 1
            size = int(self.ranks.receive(torch.zeros(1, dtype=torch.int64), last))
            if not 0 < size <= MAX_RESULT_BYTES:
                raise RuntimeError(f"the last rank announces results of {size} bytes")
            result = self.ranks.receive(torch.empty(size, dtype=torch.uint8), last).numpy().tobytes()
        token_ids, *logprobs = unpack(result)
        assert token_ids is not None
        num_own = len(LogprobsOutput._fields)
        own, found = logprobs[:num_own], logprobs[num_own:]
        return SampleOutput(token_ids, _named(LogprobsOutput, own)), _named(InputLogprobs, found)

    def _receive(self, num_tokens: int) -> torch.Tensor:
        """Hidden states from the stage before."""
        weight = next(self.model.parameters())
        like = torch.empty(num_tokens, self.model.config.hidden_size, dtype=weight.dtype)
        return self.ranks.receive(like, self.ranks.rank - 1).to(weight.device)

    def _send(self, x: torch.Tensor, to: int) -> None:
        """Send without waiting, because the receiver may still compute. Waits for sends of earlier
        launches."""
        self._sent.append((x, self._start_send(x, to)))
        while len(self._sent) > 4 * self.ranks.size:
            self._sent.popleft()[1].wait()

    def _start_send(self, x: torch.Tensor, to: int) -> Any:
        """x must not be overwritten until `wait` of the result has returned."""
        return self.ranks.start_send(x, to)


def _named(kind: Callable[..., _Any], parts: Sequence[torch.Tensor | None]) -> _Any | None:
    return None if parts[0] is None else kind(*parts)


class Launched(NamedTuple):
    """A micro-batch in flight."""

    batch: ScheduleBatch
    forward_batch: ForwardBatch
    epochs: list[int]  # of each request, when it was launched: a retraction ends its stay
    num_input_logprobs: list[int]  # of each request that extends


class PipelineScheduler(Scheduler):
    """Keeps as many batches in flight as there are stages. No request is in two of them. A request whose
    prompt is in flight is `running` already."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts, stage: Stage
    ) -> None:
        super().__init__(config, model_config, parts)
        self.stage = stage
        self.under_way: deque[Launched] = deque()

    # --8<-- [start:pipeline-step]
    def step(self) -> list[StepOutput]:
        requests = self.requests
        requests.finish_overdue()
        with self._errors_end(None):
            batch = self.get_next_batch_to_run()
        if batch is not None:
            requests.num_steps += 1
            self._launch(batch)
        if len(self.under_way) == self.stage.ranks.size or (self.under_way and batch is None):
            self._process(self.under_way.popleft())
        if not requests.live:
            self.new_token_ratio.current = self.new_token_ratio.initial
        return requests.take_outputs()

    # --8<-- [end:pipeline-step]

    def has_work(self) -> bool:
        return super().has_work() or bool(self.under_way)

    def flush_cache(self) -> bool:
        return not self.under_way and super().flush_cache()

    def forget_kv(self) -> list[StepOutput]:
        raise ValueError("pipelines keep batches of several steps in flight and do not forget KV")

    def _staying(self, launched: Launched) -> list[Req | None]:
        """The requests of a batch; None for one that has ended or was retracted since the launch."""
        live = self.requests.live
        return [
            req if live.get(req.rid) is req and req.num_retractions == epoch else None
            for req, epoch in zip(launched.batch.reqs, launched.epochs)
        ]

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        chunked_req = self.requests.chunked_req
        if chunked_req is not None and any(chunked_req in self._staying(each) for each in self.under_way):
            return None  # the next chunk follows after this one is computed
        return super().get_new_batch_prefill()

    def get_batch_decode(self) -> ScheduleBatch | None:
        busy, prompts = set[Req | None](), set[Req | None]()
        for launched in self.under_way:
            staying = self._staying(launched)
            busy.update(staying)
            prompts.update(staying[: launched.batch.num_extend_reqs])
        running = [req for req in self.requests.running if req not in prompts]
        ready = [req for req in running if req not in busy]
        if not ready:
            return None
        share = -(-len(running) // self.stage.ranks.size)  # one of as many micro-batches as stages
        batch = self.decoding.prepare(ready[:share])
        if batch is None and not self.under_way:
            return self._retract_to_decode()  # otherwise batches that end may free memory
        if batch is not None:
            self.new_token_ratio.decay()
        return batch

    def _launch(self, batch: ScheduleBatch) -> None:
        parts, device = self.parts, self.parts.allocator.device
        extending, decoding = batch.reqs[: batch.num_extend_reqs], batch.reqs[batch.num_extend_reqs :]
        newest_ids = [req.output_ids[-1] for req in decoding]
        forward_batch = make_forward_batch(batch, newest_ids, parts.num_token_ids, device)
        info = make_sampling_batch_info(batch.reqs, parts.num_token_ids, device)
        counts = [len(input_logprob_positions(req)) for req in extending]
        epochs = [req.num_retractions for req in batch.reqs]
        self.under_way.append(Launched(batch, forward_batch, epochs, counts))
        self.requests.running += [req for req in extending if req is not self.requests.chunked_req]
        self.stage.launch(forward_batch, info, parts)

    def _process(self, launched: Launched) -> None:
        output, found = self.stage.finish()
        reqs = self._staying(launched)
        self._collect_input_logprobs(launched, reqs, found)
        token_ids = output.next_token_ids.tolist()
        logprobs = to_token_logprobs(token_ids, output.logprobs)
        for i, req in enumerate(reqs):
            if req is None:
                continue
            if req is self.requests.chunked_req:  # its prompt is not complete, so its token has no meaning
                self.parts.tree_cache.cache_unfinished_req(req)
                continue
            self.requests.append_tokens(req, [token_ids[i]], logprobs[i : i + 1])
            is_prefilled = i < launched.batch.num_extend_reqs
            if not req.finished and is_prefilled:
                self.parts.tree_cache.cache_unfinished_req(req)
            has_no_token = req.finished and is_prefilled and token_ids[i] < 0
            if has_no_token and held_nan(req, self.parts.num_token_ids):
                self._discard(req)

    def _collect_input_logprobs(
        self, launched: Launched, reqs: Sequence[Req | None], found: InputLogprobs | None
    ) -> None:
        ids = launched.forward_batch.input_logprob_ids
        token_ids = [] if found is None or ids is None else ids.tolist()
        extending = reqs[: launched.batch.num_extend_reqs]
        distribute_input_logprobs(extending, launched.num_input_logprobs, token_ids, found)


def implementation(component: str, impl: Any, config: EngineConfig, ranks: Collectives) -> Any:
    """What a stage has in place of an implementation of a component."""
    if component != "scheduler":
        return impl

    def scheduler(config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> Scheduler:
        return PipelineScheduler(config, model_config, parts, Stage(parts.model_runner, ranks))

    return scheduler
