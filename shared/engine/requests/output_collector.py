"""Gathers one request's StepOutputs into text: piece by piece for a stream, whole at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, count

from diptych.shared.interfaces import Detokenizer
from diptych.shared.types import FinishReason, GenerateOutput, Req, SpeculationStats, StepOutput, TokenLogprob


def sample_ids(name: str, n: int) -> list[str]:
    """The ids of the n samples of a request, as users see them."""
    return [name] if n == 1 else [f"{name}#{i}" for i in range(n)]


class OutputCollector:
    """The outputs of one request. Without a detokenizer the text stays empty."""

    def __init__(self, req: Req, index: int, detokenizer: Detokenizer | None, submitted_as: str) -> None:
        self.req = req
        self.scheduler_rid = req.rid
        self.rid = sample_ids(submitted_as, req.sampling_params.n)[index]
        self.submitted_as = submitted_as  # the id that all samples of a request share
        self.index = index
        self.num_prompt_tokens = len(req.origin_input_ids)
        self.detokenizer = detokenizer
        self.output_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.is_aborted = False
        self.num_cached_tokens = 0
        self.num_retractions = 0
        self.speculation = SpeculationStats()
        self.output_logprobs: list[TokenLogprob] = []
        self.input_logprobs: list[TokenLogprob] = []
        self.embedding: list[float] | None = None
        self.weight_version = 0
        self._num_taken = 0
        self._num_text_taken = 0
        self._finish_taken = False

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def holds_id(self) -> bool:
        """False once the request was aborted or refused, though its end is not reported yet."""
        return not self.is_aborted and not self.req.finished

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    def add(self, output: StepOutput, weight_version: int = 0) -> None:
        assert not self.is_finished, f"{self.rid}: output after the end"
        self.output_ids += output.new_token_ids
        self.output_logprobs += output.output_logprobs
        self.input_logprobs = output.input_logprobs
        self.embedding = output.embedding
        self.num_cached_tokens = output.num_cached_tokens
        self.num_retractions = output.num_retractions
        self.speculation = output.speculation
        self.finish_reason = output.finished_reason
        self.weight_version = weight_version
        if self.detokenizer is not None:
            self.text += self.detokenizer.append(output.new_token_ids, output.finished_reason)

    def take(self) -> GenerateOutput | None:
        """The output since the last call, or None."""
        new_ids, new_text = self.output_ids[self._num_taken :], self.text[self._num_text_taken :]
        if not new_ids and not new_text and (not self.is_finished or self._finish_taken):
            return None
        piece = self._output(new_text, new_ids, self.output_logprobs[self._num_taken :])
        self._num_taken, self._num_text_taken = len(self.output_ids), len(self.text)
        self._finish_taken = self.is_finished
        return piece

    def whole(self) -> GenerateOutput:
        return self._output(self.text, list(self.output_ids), list(self.output_logprobs))

    def _output(self, text: str, ids: list[int], logprobs: list[TokenLogprob]) -> GenerateOutput:
        return GenerateOutput(
            rid=self.rid,
            index=self.index,
            text=text,
            output_ids=ids,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.output_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_retractions=self.num_retractions,
            output_logprobs=logprobs,
            input_logprobs=self.input_logprobs,
            speculation=self.speculation,
            weight_version=self.weight_version,
        )


def new_name(rid: str | None, n: int, names: Iterator[int], collectors: Mapping[str, OutputCollector]) -> str:
    """The id of a new request: `rid`, or the next of `names`. Raises `ValueError` if a live request has it or
    the id of one of its n samples."""
    if rid is None:
        return next(name for name in (f"req-{i}" for i in names) if name not in collectors)
    taken = {each for c in collectors.values() if c.holds_id for each in (c.rid, c.submitted_as)}
    for each in (rid, *sample_ids(rid, n)):
        if each in taken:
            raise ValueError(f"request id {each!r} is in use")
    return rid


def unused_id(rid: str, collectors: Mapping[str, OutputCollector]) -> str:
    """An id for the scheduler, where a request keeps its id until its end is reported."""
    candidates = chain([rid], (f"{rid}:{i}" for i in count()))
    return next(name for name in candidates if name not in collectors)
