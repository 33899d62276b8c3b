"""LLM: the engine in one process. Prompts in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import cycle
from typing import TYPE_CHECKING, Any

from diptych.shared.config import EngineConfig
from diptych.shared.dialects.parts.choose import dialect_of, reasoning_fields
from diptych.shared.engine.processes.start import start_assembly
from diptych.shared.engine.python_runtime import deferred_interrupts, gc_freeze
from diptych.shared.engine.requests.embedding import (
    NO_TOKENS,
    EmbedOutput,
    check_dimensions,
    embed_outputs,
)
from diptych.shared.engine.requests.images import ImagesPrompt, take_images, with_images
from diptych.shared.engine.requests.input_embeds import as_prompts
from diptych.shared.engine.requests.lora_adapters import adapters_of
from diptych.shared.engine.requests.output_collector import OutputCollector
from diptych.shared.engine.requests.prompts import Prompt, prompt_list
from diptych.shared.engine.requests.submission import LiveRequests, Submission
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.loading.sampling_defaults import read_sampling_defaults
from diptych.shared.sampling.processors import LogitProcessor
from diptych.shared.types import DiffusionParams, GenerateOutput, SamplingParams, StepOutput
from diptych.shared.types.sampling_params import params_of_prompts

if TYPE_CHECKING:  # an option: msgspec
    from diptych.shared.engine.weight_updates import WeightUpdates

Message = Mapping[str, Any]

REQUEST_FIELDS = ("rid", "extra_key", "priority", "routing_key", "logit_processor", "lora", "diffusion")
"""Keywords of `generate`, `stream` and `chat` that concern the request; others are sampling parameters."""


class LLM:
    """A model with its scheduler, in this process.

        llm = LLM("tiny-dense")
        print(llm.generate("Count from 3 to 9.", temperature=0, max_tokens=32).text)
        print(llm.chat([{"role": "user", "content": "What is 12 + 30?"}]).text)

    model: a built-in model's name, a local folder, or a Hugging Face id. Other keywords are the fields of
    EngineConfig. `config`: all of them in one object, which keywords then change.

    Raises `ValueError` for a bad flag or an unusable model, before memory is taken.

    Threads may share an LLM: one call at a time works on the engine, and each step serves all requests.
    Ctrl-C takes effect between two steps; a second Ctrl-C, at once.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **flags: Any) -> None:
        if model is not None:
            flags["model"] = model
        config = (config or EngineConfig()).updated(**flags)
        if config.disaggregation_mode is not None:
            raise ValueError(f"disaggregation_mode={config.disaggregation_mode} is of servers: diptych serve")
        self.sampling_defaults = read_sampling_defaults(config)
        self._default_params = SamplingParams(**self.sampling_defaults)
        assembly = start_assembly(config)
        self.config = assembly.config
        self.model_config = assembly.model_config
        self.tokenizer = assembly.tokenizer
        self.assembly = assembly
        self.scheduler = assembly.scheduler
        self.timeline = assembly.parts.timeline
        self._live = LiveRequests(self.scheduler, self.timeline, self.config.random_seed)

    # ---- answers ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        input_embeds: Any = None,
        images: Sequence[Any] | None = None,
        progress: bool = True,
        **keywords: Any,
    ) -> GenerateOutput | list[GenerateOutput]:
        """Answer one prompt or a list of them, each a text or a list of token ids.

        sampling_params: for all prompts, or one for each. Default: the model's generation_config.json, then
        the defaults of SamplingParams. Keywords change them: any field of SamplingParams,
        `max_tokens` for max_new_tokens, and rid, extra_key, priority, routing_key, logit_processor, lora,
        diffusion as in `submit`.
        input_embeds: in place of prompts: rows for layer 0, [num_tokens, hidden_size], or a list of such.
        images: of the prompt, one for each placeholder; with several prompts a list for each.
        progress: show a progress bar on a terminal.

        Returns one output for one prompt with n = 1; otherwise a list, prompt by prompt, n samples each.
        Raises `ValueError` for a bad request; then no prompt is generated, and other requests go on.
        """
        request = {name: keywords.pop(name) for name in REQUEST_FIELDS if name in keywords}
        if prompts is None or input_embeds is not None:
            prompts = as_prompts(prompts, input_embeds)
        batch, is_single = prompt_list(prompts)
        if images is not None:
            batch = with_images(batch, images, is_single)
        given = self._default_params if sampling_params is None else sampling_params
        params = [each.updated(**keywords) for each in params_of_prompts(given, len(batch))]
        rid = request.pop("rid", None)
        rids = [rid] if is_single or rid is None else [f"{rid}-{i}" for i in range(len(batch))]
        submissions = (
            Submission(self.assembly, prompt, its_params, rid=its_rid, **request)
            for prompt, its_params, its_rid in zip(batch, params, cycle(rids))
        )
        collectors = self._answer(submissions, progress)
        outputs = [collector.whole() for collector in collectors]
        return outputs[0] if is_single and len(outputs) == 1 else outputs

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> GenerateOutput | list[GenerateOutput]:
        """Answer a conversation: messages with `role` and `content`, through the model's chat template.

        template_args: the template's own switches, such as enable_thinking. Keywords and result as in
        `generate`; a grammar applies behind the reasoning block, if the model writes one. Raises `ValueError`
        for a model without a chat template."""
        prompt, ending = self._conversation(messages, dict(template_args or {}))
        assert self.tokenizer is not None, "it has written the prompt"
        reasoning = reasoning_fields(self.dialect, ending, self.tokenizer)
        return self.generate(prompt, sampling_params, **{**reasoning, **keywords})

    def chat_prompt(self, messages: Sequence[Message], /, **template_args: Any) -> list[int] | ImagesPrompt:
        """The prompt of a conversation, for `generate` and `stream`: token ids, and images if it has some."""
        return self._conversation(messages, template_args)[0]

    def _conversation(
        self, messages: Sequence[Message], template_args: dict[str, Any]
    ) -> tuple[list[int] | ImagesPrompt, str]:
        """The prompt, and what the chat template wrote behind the last message."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no chat template: give token ids")
        plain, images = take_images(messages)
        template_args.setdefault("max_chars", (self.config.context_len or 0) * self.tokenizer.max_token_bytes)
        markers = (self.dialect.reasoning or ())[:2]
        prompt = self.tokenizer.conversation(plain, ending_with=markers, **template_args)
        return ImagesPrompt(prompt.ids, images) if images else prompt.ids, prompt.ending

    @cached_property
    def dialect(self) -> Dialect:
        """How the model writes reasoning and tool calls."""
        return dialect_of(self.config, self.tokenizer)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, **keywords: Any
    ) -> EmbedOutput | list[EmbedOutput]:
        """The embedding of one prompt or of each of a list: the hidden state of its last token after the
        final norm, of which the first `dimensions` are kept (default: all), scaled to L2 norm 1. A reward
        model gives its scores instead, unscaled.

        Keywords: rid, extra_key, priority, routing_key, lora, as in `submit`. Raises `ValueError` for a bad
        request, and `RuntimeError` when a prompt's hidden states are not finite."""
        num_labels = self.model_config.num_labels
        check_dimensions(dimensions, num_labels or self.model_config.hidden_size)
        batch, is_single = prompt_list(prompts)
        fields = {"is_pooling": True, **keywords}
        submissions = (Submission(self.assembly, prompt, NO_TOKENS, **fields) for prompt in batch)
        collectors = self._answer(submissions, progress=False)
        outputs = embed_outputs(collectors, dimensions, num_labels)
        return outputs[0] if is_single else outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **keywords: Any
    ) -> Iterator[GenerateOutput]:
        """Answer one prompt piece by piece; with n > 1 the pieces of all samples, distinguished by `index`.

        Keywords as in `generate`. The request is submitted (and bad input raised) at the call. Dropping the
        iterator aborts the request."""
        request = {name: keywords.pop(name) for name in REQUEST_FIELDS if name in keywords}
        given = self._default_params if sampling_params is None else sampling_params
        params = params_of_prompts(given, 1)[0].updated(**keywords)
        with deferred_interrupts():
            pieces = self._stream(self.submit(prompt, params, **request))
            next(pieces)  # a generator that was never started would not clean up when it is dropped
        return pieces

    # ---- requests ----

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        rid: str | None = None,
        extra_key: str | None = None,
        priority: int = 0,
        routing_key: str | None = None,
        logit_processor: LogitProcessor | None = None,
        lora: str | None = None,
        diffusion: DiffusionParams | None = None,
        is_pooling: bool = False,
    ) -> list[OutputCollector]:
        """Queue one prompt without running anything: one collector for each of its n samples.

        rid: a name for `abort`, distinct among live requests; default: a new one. extra_key: namespace in the
        prefix cache. priority: larger is more important. routing_key: see the policy of that name.
        logit_processor: a function that changes the request's logits (slow; shared/sampling/processors.py).
        lora: the name of a loaded adapter. diffusion: answer by block diffusion. is_pooling: no tokens, but
        an embedding; see `embed`. Raises `ValueError` for a bad request; then nothing of it is left."""
        submission = Submission(
            self.assembly, prompt, sampling_params, rid=rid, extra_key=extra_key, priority=priority,
            routing_key=routing_key, logit_processor=logit_processor, lora=lora, diffusion=diffusion,
            is_pooling=is_pooling,
        )  # fmt: skip
        return self._live.submit([submission])

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder in PEFT's format; requests may then name it. It may replace one
        of the same name that no request uses. Raises `ValueError` for an invalid adapter."""
        with self._live.exclusive():
            adapters_of(self.assembly.lora).load(name, path, self.scheduler)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises `ValueError` while a request uses it."""
        with self._live.exclusive():
            adapters_of(self.assembly.lora).unload(name, self.scheduler)

    # --8<-- [start:step-in-process]
    def step(self) -> bool:
        """Run one batch; its outputs go to the collectors. False: no batch to run."""
        with self._live.exclusive():
            if not self.scheduler.has_work():
                return False
            self._deliver(self.scheduler.step(), self.assembly.weights.version)
            return True

    # --8<-- [end:step-in-process]

    def _deliver(self, outputs: list[StepOutput], weight_version: int) -> None:
        with self.timeline.span("detokenise"):
            for output in outputs:
                collector = self._live.collectors.get(output.rid)
                if collector is not None:
                    collector.add(output, weight_version)
                    if collector.is_finished:
                        del self._live.collectors[output.rid]
        if self.timeline.is_on:
            stats, free = self.stats(), self.assembly.parts.allocator.available_size()
            self.timeline.count(running=stats.num_running, waiting=stats.num_waiting, free_tokens=free)

    @cached_property
    def _updates(self) -> WeightUpdates:
        try:
            from diptych.shared.engine.weight_updates import WeightUpdates
        except ModuleNotFoundError as error:
            raise ValueError(f"weight updates need {error.name}: pip install 'diptych[parallel]'") from None
        return WeightUpdates(self.assembly, self._deliver)

    @contextmanager
    def weight_updates(self) -> Iterator[WeightUpdates]:
        """What changes the weights, between two steps: from a folder, tensors or a trainer's process.

            with llm.weight_updates() as weights:
                weights.from_folder("trained")  # raises ValueError, and then nothing has changed

        Requests that run go back to the queue and go on with the new weights; the prefix cache starts
        empty. Outputs carry `weight_version`, the number of updates."""
        with self._live.exclusive():
            yield self._updates

    def abort(self, rid: str) -> bool:
        """End a request (with n > 1: all its samples). False if it has ended or is unknown."""
        found = [c for c in list(self._live.collectors.values()) if rid in (c.rid, c.submitted_as)]
        were_alive = [self._live.abort(collector) for collector in found]  # a list: each of them is to end
        return any(were_alive)

    def flush_cache(self) -> bool:
        """Forget all cached prefixes and compiled grammars. Refused (False) while requests are alive."""
        with self._live.exclusive():
            if not self.scheduler.flush_cache():
                return False
            self.assembly.grammars.clear()
            return True

    def describe(self) -> dict[str, str]:
        """The implementation of each component, and the use of memory."""
        return {**self.assembly.selection, **self.assembly.memory.rows()}

    def stats(self) -> Any:
        num_compiled = self.assembly.compilations.num_after_ready
        return self.scheduler.stats()._replace(num_compiled_kernels=num_compiled)

    def _answer(self, submissions: Iterable[Submission], progress: bool) -> list[OutputCollector]:
        """Submit requests and run them to their ends; after an error none is left."""
        collectors: list[OutputCollector] = []
        try:
            with gc_freeze():
                with deferred_interrupts():
                    collectors = self._live.submit(submissions)
                if progress:
                    self._show_progress(collectors)
                while not all(c.is_finished for c in collectors) and self.step():
                    pass
        except BaseException:
            for collector in collectors:
                self._live.abort(collector)
            raise
        return collectors

    def _show_progress(self, collectors: list[OutputCollector]) -> None:
        from tqdm.auto import tqdm

        with tqdm(total=len(collectors), unit="answer", desc="generate", leave=False, disable=None) as bar:
            while not all(c.is_finished for c in collectors) and self.step():
                bar.update(sum(c.is_finished for c in collectors) - bar.n)
                bar.set_postfix(tokens=sum(c.num_output_tokens for c in collectors))

    def _stream(self, collectors: list[OutputCollector]) -> Iterator[GenerateOutput]:
        """Yields an empty piece before the others, which starts the generator."""
        try:
            yield collectors[0].whole()
            while True:
                for collector in collectors:
                    piece = collector.take()
                    if piece is not None:
                        yield piece
                if all(c.is_finished for c in collectors) or not self.step():
                    break
            for collector in collectors:
                piece = collector.take()
                if piece is not None:
                    yield piece
        finally:
            for collector in collectors:
                self._live.abort(collector)
