"""Requests on their way into the scheduler: their checks, the `Req` of each sample, and those that live."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.python_runtime import deferred_interrupts, set_at_exit
from diptych.shared.engine.requests.diffusion import accept_diffusion
from diptych.shared.engine.requests.embedding import check_pooling
from diptych.shared.engine.requests.lora_adapters import adapters_of, cache_namespace
from diptych.shared.engine.requests.output_collector import OutputCollector, new_name, sample_ids, unused_id
from diptych.shared.engine.requests.prompts import Prompt, encode_prompt
from diptych.shared.interfaces import Detokenizer, Scheduler
from diptych.shared.sampling.processors import LogitProcessor
from diptych.shared.sampling.sampling_batch import derive_seed
from diptych.shared.scheduling.admission import check_fields
from diptych.shared.text.bad_words import with_bad_word_ids
from diptych.shared.timeline import Timeline
from diptych.shared.types import DiffusionParams, Req, SamplingParams


class Submission:
    """A checked request, whose grammar is compiled. Its fields are those of `LLM.submit`. Raises `ValueError`
    for a bad one."""

    def __init__(
        self,
        assembly: Assembly,
        prompt: Prompt,
        params: SamplingParams,
        *,
        rid: str | None = None,
        extra_key: str | None = None,
        priority: int = 0,
        routing_key: str | None = None,
        logit_processor: LogitProcessor | None = None,
        lora: str | None = None,
        diffusion: DiffusionParams | None = None,
        is_pooling: bool = False,
    ) -> None:
        with assembly.parts.timeline.span("tokenise"):
            self.prompt_ids, self.embeds = encode_prompt(prompt, params, assembly)
        if (params.stop or params.stop_regex) and assembly.tokenizer is None:
            raise ValueError("this model has no tokenizer: stop and stop_regex need one")
        if params.bad_words:
            params = with_bad_word_ids(params, assembly.tokenizer)
        check_fields(rid, extra_key, priority, routing_key, logit_processor)
        if is_pooling or assembly.model_config.num_labels:
            check_pooling(is_pooling, assembly.config, assembly.model_config)
        if diffusion is not None:
            others = self.embeds, logit_processor
            accept_diffusion(diffusion, params, self.prompt_ids, others, assembly)
        self.compiled = assembly.grammars.submit(params) if params.given_grammars else None
        if self.compiled is not None:
            self.compiled.result()  # before the engine is locked, so that other threads continue
        self.assembly = assembly
        self.params = params
        self.rid, self.extra_key = rid, extra_key
        self.priority, self.routing_key = priority, routing_key
        self.logit_processor = logit_processor
        self.lora = lora
        self.diffusion = diffusion
        self.is_pooling = is_pooling

    def req(self, rid: str, seed: int) -> Req:
        """The request of one sample, as the scheduler takes it."""
        adapter = None if self.lora is None else adapters_of(self.assembly.lora).get(self.lora)
        namespace: Any = self.extra_key
        if adapter is not None or self.diffusion is not None:
            namespace = cache_namespace(self.extra_key, adapter, self.diffusion)
        req = Req(
            rid=rid,
            origin_input_ids=self.prompt_ids,
            sampling_params=self.params,
            seed=seed,
            eos_token_ids=self.assembly.eos_token_ids,
            extra_key=namespace,
            priority=self.priority,
            routing_key=self.routing_key,
            logit_processor=self.logit_processor,
            lora=adapter,
            diffusion=self.diffusion,
            embeds=self.embeds,
            is_pooling=self.is_pooling,
        )
        if self.compiled is not None:
            req.grammar = self.assembly.grammars.grammar_for(req, self.compiled.result())
        return req

    def detokenizer(self) -> Detokenizer | None:
        if self.assembly.tokenizer is None:
            return None
        text_ids = self.prompt_ids if self.embeds is None or self.embeds.has_token_ids else []
        return self.assembly.detokenizer(self.assembly.tokenizer, self.params, text_ids)


class LiveRequests:
    """The requests of an engine that have not ended. One thread at a time works on the engine."""

    def __init__(self, scheduler: Scheduler, timeline: Timeline, random_seed: int) -> None:
        self.scheduler = scheduler
        self.timeline = timeline
        self.collectors: dict[str, OutputCollector] = {}  # by the scheduler's request id
        self.lock = threading.RLock()
        self._names = count()  # of requests without an rid
        self._random = random.Random(random_seed)  # seeds of requests that bring none
        self._unused_seeds: list[int] = []  # drawn for refused requests: the next ones get them
        self._depth = 0  # of nested calls that work on the engine, in the thread that holds the lock
        self._aborts: list[str] = []  # asked for inside such a call: done at its end
        self._is_over = set_at_exit(self)

    def submit(self, submissions: Iterable[Submission]) -> list[OutputCollector]:
        """Queue all of them; after an error none, and later requests get the seeds that these would have
        had."""
        collectors: list[OutputCollector] = []
        seeds: list[int] = []  # drawn
        try:
            for submission in submissions:
                num_samples, seed = submission.params.n, submission.params.seed
                with self.exclusive():
                    name = new_name(submission.rid, num_samples, self._names, self.collectors)
                    if seed is None:
                        unused = self._unused_seeds
                        seed = unused.pop() if unused else self._random.getrandbits(63)
                        seeds.append(seed)
                    for i, sample_id in enumerate(sample_ids(name, num_samples)):
                        rid = unused_id(sample_id, self.collectors)
                        req = submission.req(rid, derive_seed(seed, i))
                        with self.timeline.span("receive"):
                            self.scheduler.add_request(req)
                        collector = OutputCollector(req, i, submission.detokenizer(), submitted_as=name)
                        self.collectors[rid] = collector
                        collectors.append(collector)
        except BaseException:
            for collector in collectors:
                self.abort(collector)
            with self.lock:
                self._unused_seeds += reversed(seeds)
            raise
        return collectors

    def abort(self, collector: OutputCollector) -> bool:
        """End one sample, at the end of the step if one runs: the garbage collector may close a stream."""
        with deferred_interrupts(), self.lock:
            rid = collector.scheduler_rid
            if rid not in self.collectors or collector.is_aborted or self._is_over.is_set():
                return False
            collector.is_aborted = True
            if self._depth == 0:
                return self.scheduler.abort(rid)
            self._aborts.append(rid)
            return True

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclusive work on the engine; aborts and interrupts that arrive are processed at its end."""
        with deferred_interrupts(), self.lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                while self._depth == 0 and self._aborts:
                    self.scheduler.abort(self._aborts.pop())
