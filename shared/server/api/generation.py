"""One HTTP request's work in the engine: prompts times samples, merged deltas, cancellation."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.shared.interfaces.detokenizer import TokenText
from diptych.shared.sampling.sampling_batch import derive_seed
from diptych.shared.server.api.chat_choice import AnswerForm
from diptych.shared.server.engine.engine_client import Delta, EngineClient, EngineDead, Live
from diptych.shared.server.engine.messages import Finish, Generate
from diptych.shared.server.http.access import Caller
from diptych.shared.server.http.errors import ApiError, bad_request
from diptych.shared.server.http.metrics import Metrics
from diptych.shared.server.http.tracing import RequestFacts
from diptych.shared.text.control_text import ControlText
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types import DiffusionParams, FinishAbort, SamplingParams

MAX_BACKLOG_TOKENS = 16384
"""Tokens of one sample that wait for a client that does not read; beyond, the request is dropped."""
MAX_TAKEN = 4096
"""Values that are written for a client before other requests get their turn: a few milliseconds. A delta and
its token are as much work as VALUES_OF_A_DELTA, and a token id of a prompt far less."""
VALUES_OF_A_DELTA = 16
IDS_OF_A_VALUE = 32
MAX_INPUT_LOGPROBS = 2**20
"""Of all samples of a request. They are held in memory until the answer is written."""


@dataclass
class Usage:
    """Token counts of one HTTP request: each prompt counts once, whatever n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # of the completion tokens, the ones that speculation gave in addition


@dataclass
class Sample:
    """One choice: its request in the engine, and what has come of it."""

    index: int
    rid: str
    num_prompt_tokens: int
    is_first_of_prompt: bool
    finish: Finish | None = None
    num_tokens: int = 0  # taken so far, and so are accepted tokens
    num_cached_tokens: int = 0
    num_accepted_tokens: int = 0
    has_tokens: bool = False  # of the engine, taken or not
    first_token_time: float | None = None
    queue_time: float | None = None
    pending: Delta | None = None  # came since the last `take`
    last_time: float = field(default_factory=time.monotonic)


class Generation:
    """Runs prompts x n samples and yields (index, delta) in the order in which deltas arrive. Choice
    prompt * n + sample has that index. Leaving the iteration early aborts what has not ended."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seed: int | Sequence[int],
        extra_key: str | None = None,
        priority: int = 0,
        routing_key: str | None = None,
        lora: str | Sequence[str | None] | None = None,
        is_pooling: bool = False,
        input_embeds: Sequence[bytes] = (),
        images: Sequence[bytes] = (),
        diffusion: DiffusionParams | None = None,
        name: str | Sequence[str] | None = None,
        form: AnswerForm | None = None,
        keeps_aborted: bool = False,
    ) -> None:
        """params, seed, lora, name: of all prompts, or of each; all params have the same n. name: an id of
        the client's for aborts, which no other live request of the client has. form: how answers are read.
        keeps_aborted: an abort is the end of an answer, not an error."""
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.prompts = list(prompts)
        self.each_params = _for_each(params, self.prompts)
        self.params = self.each_params[0]
        self._names: list[str | None] = _for_each(name, self.prompts)
        self._keeps_aborted = keeps_aborted
        self._seeds = _for_each(seed, self.prompts)
        self._loras = _for_each(lora, self.prompts)
        self._input_embeds = list(input_embeds) or [b""] * len(self.prompts)
        self.request_fields: dict[str, Any] = {
            "extra_key": extra_key,
            "priority": priority,
            "routing_key": routing_key,
            "is_pooling": is_pooling,
            "images": list(images),
            "diffusion": diffusion,
        }
        self.form = form
        self.text: TokenText | None = tokenizer  # of the answers
        if tokenizer is not None and form is not None and form.controls:
            self.text = ControlText(tokenizer, form.controls)
        self._caller: Caller | None = None
        base, n = uuid.uuid4().hex, self.params.n
        self.samples = [
            Sample(i * n + k, f"{base}-{i}-{k}", len(prompt), is_first_of_prompt=k == 0)
            for i, prompt in enumerate(self.prompts)
            for k in range(n)
        ]
        self._values = [values_of_token(each) for each in self.each_params]
        self._check_input_logprobs()
        self._turn = 0  # the sample that is the first to be looked at
        self.start_time = time.monotonic()
        self.num_reasoning_tokens = 0  # counted where the text is split
        self._arrived = asyncio.Event()

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[index // self.params.n]

    def params_of(self, index: int) -> SamplingParams:
        return self.each_params[index // self.params.n]

    def name_of(self, index: int) -> str | None:
        return self._names[index // self.params.n]

    def num_values(self, index: int, num_tokens: int) -> int:
        """Values of the log-probabilities of so many tokens of a choice, or else their number."""
        return num_tokens * self._values[index // self.params.n]

    @property
    def num_answer_values(self) -> int:
        """At least as many as a whole answer has."""
        return sum(
            self.num_values(sample.index, sample.num_prompt_tokens + sample.num_tokens)
            for sample in self.samples
        )

    def _check_input_logprobs(self) -> None:
        total = sum(
            params.n * max(len(prompt) - params.logprob_start_len, 0) * values
            for prompt, params, values in zip(self.prompts, self.each_params, self._values, strict=True)
            if params.return_logprob and params.logprob_start_len >= 0
        )
        if total > MAX_INPUT_LOGPROBS:
            raise bad_request(
                f"a request takes at most {MAX_INPUT_LOGPROBS} log-probabilities of prompts: tokens, times "
                f"those of each, times n; these are {total}"
            )

    def belong_to(self, caller: Caller) -> None:
        """Say whose the generation is, before it runs. Clients with different keys share no cached prefix:
        its length in `usage` would tell whether another's prompt begins like a guess."""
        self._caller = caller
        self.request_fields["client"] = caller.name
        self.request_fields["prefill_server"] = caller.prefill_server
        if caller.has_others:
            self.request_fields["extra_key"] = f"{caller.owner}:{self.request_fields['extra_key'] or ''}"

    @property
    def usage(self) -> Usage:
        firsts = [sample for sample in self.samples if sample.is_first_of_prompt]
        return Usage(
            prompt_tokens=sum(sample.num_prompt_tokens for sample in firsts),
            completion_tokens=sum(sample.num_tokens for sample in self.samples),
            cached_tokens=sum(sample.num_cached_tokens for sample in firsts),
            reasoning_tokens=self.num_reasoning_tokens,
            accepted_tokens=sum(sample.num_accepted_tokens for sample in self.samples),
        )

    # --8<-- [start:run-generation]
    async def run(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Lists of what came meanwhile, one delta for each choice at most. Raises
        `ApiError` when a sample is refused, aborted or fails: then the others end too."""
        try:
            await self._submit()
            num_open = len(self.samples)
            while num_open:
                await self._arrived.wait()
                self._arrived.clear()
                deltas = self._take()
                num_open -= sum(delta.finish is not None for _, delta in deltas)
                for _, delta in deltas:
                    if not (self._keeps_aborted and _is_abort(delta.finish)):
                        _raise_failure(delta.finish)
                yield deltas
                if self._arrived.is_set():
                    await asyncio.sleep(0)  # there may be more to take: others first
        finally:
            self.client.abort(sample.rid for sample in self.samples if sample.finish is None)
            self._report_end()

    # --8<-- [end:run-generation]

    def _report_end(self) -> None:
        usage, seconds = self.usage, time.monotonic() - self.start_time
        is_aborted = any(s.finish is None or s.finish.kind in ("abort", "error") for s in self.samples)
        self.metrics.request_ended(usage.prompt_tokens, usage.cached_tokens, seconds, is_aborted)
        firsts = [s.first_token_time for s in self.samples if s.first_token_time is not None]
        facts = RequestFacts(
            rid=self.samples[0].rid,
            seconds=seconds,
            first_token_seconds=min(firsts) - self.start_time if firsts else None,
            queue_seconds=self.samples[0].queue_time,
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            num_cached_tokens=usage.cached_tokens,
            is_aborted=is_aborted,
        )
        self.metrics.tracer.request(facts)

    async def _submit(self) -> None:
        assert self._caller is not None, "a request without an owner would share its prefixes with all"
        for sample in self.samples:
            if sample.index:
                await asyncio.sleep(0)  # a long prompt with many samples must not keep others waiting
            i, k = divmod(sample.index, self.params.n)
            prompt, params, name = self.prompts[i], self.each_params[i], self._names[i]
            if name is not None and k == 0 and self.client.rids_of(name, self._caller.owner):
                raise bad_request(f"the id {name!r} is that of a request that has not ended", "rid")
            message = Generate(
                rid=sample.rid,
                input_ids=prompt,
                params=params,
                seed=derive_seed(self._seeds[i], k),
                lora=self._loras[i],
                input_embeds=self._input_embeds[i],
                **self.request_fields,
            )
            detokenizer = None
            if self.text is not None:
                text_ids = [] if self._input_embeds[i] else prompt
                detokenizer = self.client.detokenizer(self.text, params, text_ids)
            try:
                self.client.generate(
                    message, Live(detokenizer, self._deliver_to(sample), name, self._caller.owner)
                )
            except EngineDead as error:
                raise ApiError(503, f"the engine is not running: {error}") from None
            except OverflowError:
                raise bad_request("an integer of the request exceeds 64 bits") from None

    def _deliver_to(self, sample: Sample) -> Callable[[Delta], None]:
        def deliver(delta: Delta) -> None:
            if delta.queue_time is not None:
                self.metrics.queue_time.observe(delta.queue_time)
                sample.queue_time = delta.queue_time
            if delta.token_ids:
                now, is_first = time.monotonic(), not sample.has_tokens
                sample.first_token_time = now if is_first else sample.first_token_time
                since = self.start_time if is_first else sample.last_time
                self.metrics.tokens_came(len(delta.token_ids), now - since, is_first)
                sample.last_time, sample.has_tokens = now, True
            sample.num_cached_tokens = delta.num_cached_tokens
            sample.finish = delta.finish
            if sample.pending is None:
                sample.pending = delta
            else:
                sample.pending.merge(delta)
            if len(sample.pending.token_ids) > MAX_BACKLOG_TOKENS and sample.finish is None:
                reason = f"the client does not read: {len(sample.pending.token_ids)} tokens wait for it"
                self.client.abort([sample.rid], reason)
            self._arrived.set()

        return deliver

    def _take(self) -> list[tuple[int, Delta]]:
        """What has come, as far as it has MAX_TAKEN values. The rest is taken next."""
        taken, room = [], MAX_TAKEN
        for sample in self.samples[self._turn :] + self.samples[: self._turn]:
            if sample.pending is None or sample.pending.is_incomplete:
                continue
            if room <= 0:
                self._turn = sample.index
                self._arrived.set()
                break
            values = self._values[sample.index // self.params.n]
            delta, sample.pending = sample.pending.split(max(room // values, 1))
            if sample.pending is not None:
                self._arrived.set()
            taken.append((sample.index, delta))
            room -= max(len(delta.token_ids) * values, VALUES_OF_A_DELTA)
            if not sample.num_tokens:
                room -= sample.num_prompt_tokens // IDS_OF_A_VALUE  # they may be in the answer
            sample.num_tokens += len(delta.token_ids)
            sample.num_accepted_tokens = delta.num_accepted_tokens
        return taken


def values_of_token(params: SamplingParams) -> int:
    """Values of the log-probabilities of a token, or 1."""
    return 1 + params.top_logprobs_num + len(params.token_ids_logprob)


def _for_each(value: Any, prompts: Sequence[Any]) -> list[Any]:
    """The value of each prompt, of a list of them or of one value for all."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * len(prompts)


def _is_abort(finish: Finish | None) -> bool:
    """Whether the client or the server asked for the end: a refusal has another status."""
    return finish is not None and finish.kind == "abort" and finish.status == FinishAbort("").status


def _raise_failure(finish: Finish | None) -> None:
    """An abort or an error is an error object, never a finish_reason."""
    if finish is not None and finish.kind in ("abort", "error"):
        status = finish.status if finish.status >= 400 and finish.status != 499 else 503
        raise ApiError(status, finish.message)
