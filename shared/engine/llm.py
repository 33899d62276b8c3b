"""LLM: the engine in one process. Prompts in, text out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from shared.config import EngineConfig
from shared.engine.assembly import assemble
from shared.engine.gc_freeze import gc_freeze
from shared.engine.output_collector import OutputCollector
from shared.sampling.sampling_batch import derive_seed
from shared.types import GenerateOutput, Req, SamplingParams

Prompt = str | list[int]


class LLM:
    """Assembles the chosen components and drives the scheduler.

        llm = LLM(model="tiny-dense")
        print(llm.generate("Who has the red kite?").text)

    Keyword arguments are the fields of EngineConfig. Not thread-safe; several `stream`s may be read in turn.
    """

    def __init__(self, config: EngineConfig | None = None, **flags: Any) -> None:
        assembly = assemble((config or EngineConfig()).updated(**flags))
        self.config = assembly.config
        self.model_config = assembly.model_config
        self.tokenizer = assembly.tokenizer
        self.assembly = assembly
        self.scheduler = assembly.scheduler
        self.timeline = assembly.parts.timeline
        self._collectors: dict[str, OutputCollector] = {}  # of the requests that are alive
        self._rids = count()
        self._seeds = random.Random(self.config.random_seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **request: Any,
    ) -> GenerateOutput | list[GenerateOutput]:
        """Answer one prompt or a list of them, each a text or a list of token ids. One prompt with n = 1
        gives one output; otherwise a list, prompt by prompt, n samples each. `request`: rid, extra_key,
        priority, routing_key, as in `submit`.

        Raises `ValueError` for a bad request; then none of the prompts is generated, and requests submitted
        otherwise are not disturbed.
        """
        is_single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: list[Prompt] = [prompts] if is_single else list(prompts)  # type: ignore[list-item]
        params = self._params_of(sampling_params, len(batch))
        collectors: list[OutputCollector] = []
        try:
            with gc_freeze():
                for i, prompt in enumerate(batch):
                    names = dict(request)
                    if not is_single and names.get("rid") is not None:
                        names["rid"] = f"{names['rid']}-{i}"
                    collectors += self.submit(prompt, params[i], **names)
                self._run(collectors, progress)
        except BaseException:
            for collector in collectors:
                self.abort(collector.rid)
            raise
        outputs = [collector.whole() for collector in collectors]
        return outputs[0] if is_single and len(outputs) == 1 else outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **request: Any
    ) -> Iterator[GenerateOutput]:
        """Answer one prompt piece by piece; with n > 1 the pieces of all samples, told apart by `index`. The
        request is submitted (and bad input raised) at the call. Dropping the iterator aborts it."""
        collectors = self.submit(prompt, sampling_params or SamplingParams(), **request)
        pieces = self._stream(collectors)
        next(pieces)  # a generator that was never begun would not clean up when it is dropped
        return pieces

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        rid: str | None = None,
        extra_key: str | None = None,
        priority: int = 0,
        routing_key: str | None = None,
    ) -> list[OutputCollector]:
        """Queue one prompt without running anything: one collector for each of its n samples."""
        with self.timeline.span("tokenise"):
            prompt_ids = self._encode(prompt)
        needs_text = sampling_params.stop or sampling_params.stop_regex
        if needs_text and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: stop and stop_regex need one")
        for name, value in (("rid", rid), ("extra_key", extra_key), ("routing_key", routing_key)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a text or None, got {value!r}")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        rid = rid if rid is not None else f"req-{next(self._rids)}"
        seed = sampling_params.seed
        if seed is None:
            seed = self._seeds.getrandbits(63)
        collectors: list[OutputCollector] = []
        try:
            # --8<-- [start:make-req]
            for i in range(sampling_params.n):
                req = Req(
                    rid=rid if sampling_params.n == 1 else f"{rid}#{i}",
                    origin_input_ids=prompt_ids,
                    sampling_params=sampling_params,
                    seed=derive_seed(seed, i),
                    eos_token_ids=self._eos_token_ids(),
                    extra_key=extra_key,
                    priority=priority,
                    routing_key=routing_key,
                )
                with self.timeline.span("receive"):
                    self.scheduler.add_request(req)
                collectors.append(OutputCollector(req, i, self.tokenizer, submitted_as=rid))
                self._collectors[req.rid] = collectors[-1]
            # --8<-- [end:make-req]
        except ValueError:
            for collector in collectors:
                self.abort(collector.rid)
            raise
        return collectors

    def step(self) -> bool:
        """Run one batch and give its outputs to the collectors. False if there was no work."""
        if not self.scheduler.has_work():
            return False
        outputs = self.scheduler.step()
        with self.timeline.span("detokenise"):
            for output in outputs:
                collector = self._collectors.get(output.rid)
                if collector is not None:
                    collector.add(output)
                    if collector.is_finished:
                        del self._collectors[output.rid]
        if self.timeline.is_on:
            stats, free = self.stats(), self.assembly.parts.allocator.available_size()
            self.timeline.count(running=stats.num_running, waiting=stats.num_waiting, free_tokens=free)
        return True

    def abort(self, rid: str) -> bool:
        """End a request (with n > 1: all its samples). False when it has ended or never was."""
        rids = [r for r, collector in self._collectors.items() if rid in (r, collector.submitted_as)]
        were_alive = [self.scheduler.abort(r) for r in rids]  # a list: every one of them is to end
        return any(were_alive)

    def flush_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while requests are alive."""
        return self.scheduler.flush_cache()

    def describe(self) -> dict[str, str]:
        """Which implementation stands behind each component, and where the memory went."""
        return {**self.assembly.selection, **self.assembly.memory.rows()}

    def stats(self) -> Any:
        return self.scheduler.stats()

    def _run(self, collectors: list[OutputCollector], progress: bool) -> None:
        if not progress:
            while not all(c.is_finished for c in collectors) and self.step():
                pass
            return
        from tqdm.auto import tqdm

        with tqdm(total=len(collectors), unit="req", desc="generate", leave=False) as bar:
            while not all(c.is_finished for c in collectors) and self.step():
                bar.update(sum(c.is_finished for c in collectors) - bar.n)
                bar.set_postfix(tokens=sum(c.num_output_tokens for c in collectors))

    def _stream(self, collectors: list[OutputCollector]) -> Iterator[GenerateOutput]:
        """Gives one piece that means nothing before the others."""
        try:
            yield collectors[0].whole()
            # --8<-- [start:stream-loop]
            while True:
                for collector in collectors:
                    piece = collector.take()
                    if piece is not None:
                        yield piece
                if all(c.is_finished for c in collectors) or not self.step():
                    break
            # --8<-- [end:stream-loop]
            for collector in collectors:
                piece = collector.take()
                if piece is not None:
                    yield piece
        finally:
            for collector in collectors:
                if not collector.is_finished:
                    self.abort(collector.rid)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as token ids")
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, (list, tuple)) or not set(map(type, prompt)) <= {int}:
            raise ValueError(
                f"a prompt is a text or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}"
            )
        return list(prompt)

    def _eos_token_ids(self) -> frozenset[int]:
        ids = self.model_config.eos_token_ids
        return ids | self.tokenizer.eos_token_ids if self.tokenizer is not None else ids

    def _params_of(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * num_prompts
        if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"sampling_params are SamplingParams, or a list of them, got {params!r:.80}")
        if len(params) != num_prompts:
            raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts")
        return list(params)
