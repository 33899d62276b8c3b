"""Compares two servers, or a server and a panel, on the same prompts: errors of log-probabilities by
position, and the first token at which their choices differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from diptych.shared.engine.llm import LLM
from diptych.shared.text.token_bytes import TokenBytes
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.tools.conformance.diff.precision import run_text
from diptych.shared.tools.conformance.diff.recorder import Recorder
from diptych.shared.tools.conformance.server.answer import Top
from diptych.shared.tools.conformance.server.capabilities import Offers, probe
from diptych.shared.tools.conformance.server.client import Malformed, Refused, Server, Unreachable
from diptych.shared.tools.conformance.server.logprob_tolerance import Tolerance
from diptych.shared.types import SamplingParams

NUM_TOP = 20
BOTH_ERR = 2.0  # the tolerance is that of one side against exact values


@dataclass(frozen=True)
class Scored:
    """The log-probabilities that a side reports at one position."""

    logprob: float | None  # of the text's own next token; None: not in the side's list
    top: dict[int, float]  # the best tokens' log-probabilities

    @property
    def best(self) -> int:
        return max(self.top, key=lambda token_id: self.top[token_id])


class ScoringSide(Protocol):
    name: str

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy answer."""

    def score(self, ids: list[int]) -> dict[int, Scored]:
        """The `Scored` of every position but the last: log-probabilities of its next token."""


class PanelSide:
    """An engine in this process."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        params = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
        (answer,) = self.llm.generate([prompt], params, progress=False)  # type: ignore[misc]
        return list(answer.output_ids)

    def score(self, ids: list[int]) -> dict[int, Scored]:
        recorder = Recorder(self.llm)
        try:
            logprobs = run_text(self.llm, recorder, ids).logits.cpu().double().log_softmax(dim=1)
        finally:
            recorder.close()
        found = {}
        for position, row in enumerate(logprobs[:-1]):
            values, indices = row.topk(min(NUM_TOP, len(row)))
            top = dict(zip(indices.tolist(), values.tolist()))
            found[position] = Scored(float(row[ids[position + 1]]), top)
        return found


class ServerSide:
    """A server with OpenAI's API. Raises `ValueError` for one that cannot be scored or takes no token ids."""

    def __init__(self, url: str, tokenizer: Tokenizer, prompt: list[int], api_key: str | None = None) -> None:
        self.name = url
        self.server = Server(url, api_key, token_ids=ids_of_texts(tokenizer))
        try:
            self.server.find_model()
            self.offers: Offers = probe(self.server, prompt, tokenizer.decode(prompt))
        except Unreachable as error:
            raise ValueError(f"no server answers: {error}") from None
        for offer in ("token_id_prompts", "completion_logprobs", "generated_ids"):
            if not getattr(self.offers, offer):
                raise ValueError(f"{url} cannot be compared: {self.offers.reason(offer)}")
        self.num_top = min(NUM_TOP, self.offers.num_top_logprobs)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        answer = self.server.complete(prompt, max_tokens=max_tokens, temperature=0.0, logprobs=1)[0]
        if answer.token_ids is None:
            raise ValueError(f"{self.name} reports no ids of generated tokens")
        return list(answer.token_ids)

    def score(self, ids: list[int]) -> dict[int, Scored]:
        """Score in one request with `echo` or vLLM's `prompt_logprobs`; otherwise one request for each
        position."""
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": self.num_top}
        if of_prompt := self.offers.prompt_params(self.num_top):
            answer = self.server.complete(ids, **of_prompt, **params)[0]
            logprobs, tops = answer.prompt_logprobs or (), answer.prompt_top_logprobs or ()
            return {
                i - 1: Scored(logprobs[i], _known(tops[i]))
                for i in range(1, min(len(ids), len(tops)))
                if _known(tops[i])
            }
        found = {}
        for position in range(len(ids) - 1):
            answer = self.server.complete(ids[: position + 1], **params)[0]
            top = _known((answer.top_logprobs or ({},))[0])
            if top:
                found[position] = Scored(top.get(ids[position + 1]), top)
        return found


def _known(top: Top | None) -> dict[int, float]:
    """The entries whose token id is known."""
    return {token: value for token, value in (top or {}).items() if isinstance(token, int)}


def ids_of_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """Token text -> id, for servers that report texts alone; without texts that several tokens share."""
    table = TokenBytes(tokenizer)
    texts = [table.of(i).decode("utf-8", errors="replace") for i in range(tokenizer.vocab_size)]
    counts = Counter(texts)
    return {text: i for i, text in enumerate(texts) if text and counts[text] == 1}


@dataclass(frozen=True)
class Compared:
    """One position. `error`: difference of the log-probabilities of the text's own next token, in nats; None
    where a side does not report it. `choice`: of the best tokens."""

    text: int
    position: int
    error: float | None
    allowed: float
    choice: Literal["same", "near tie", "other"]
    a: Scored
    b: Scored
    is_answer: bool = True  # the next token is one of A's answer, not of the prompt


@dataclass
class ServerDiff:
    tolerance: Tolerance
    texts: list[list[int]] = field(default_factory=list)  # prompt and A's greedy answer
    positions: list[Compared] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        return [one.error for one in self.positions if one.error is not None]

    @property
    def mean_error(self) -> float:
        return sum(self.errors) / max(len(self.errors), 1)

    @property
    def beyond(self) -> list[Compared]:
        """Positions whose error is beyond the tolerance."""
        return [one for one in self.positions if one.error is not None and not one.error <= one.allowed]

    @property
    def worst(self) -> Compared | None:
        known = [one for one in self.positions if one.error is not None]
        return max(known, key=lambda one: one.error or 0.0, default=None)

    def num(self, choice: str) -> int:
        return sum(one.choice == choice for one in self.positions)

    @property
    def first_other(self) -> Compared | None:
        """The first position of A's answers at which the best tokens differ and are no near tie; otherwise
        the first of the prompts."""
        others = [one for one in self.positions if one.choice == "other"]
        return min(others, key=lambda one: (not one.is_answer, one.text, one.position), default=None)

    @property
    def is_same(self) -> bool:
        """Whether rounding errors explain every difference."""
        allowed = BOTH_ERR * self.tolerance.mean_error
        few = len(self.beyond) <= self.tolerance.outliers * len(self.positions)
        return bool(self.positions) and few and self.mean_error <= allowed and self.first_other is None

    def sentence(self) -> str:
        if not self.positions:
            return "Nothing could be compared: no position is scored by both sides."
        if self.is_same:
            return f"A and B agree at all {len(self.positions)} positions within the tolerance."
        first = min(
            [*self.beyond[:1], *([self.first_other] if self.first_other else [])],
            key=lambda one: (one.text, one.position),
            default=None,
        )
        where = "" if first is None else f", first at position {first.position} of prompt-{first.text}"
        return (
            f"A and B differ: {len(self.beyond)} of {len(self.positions)} positions are beyond the "
            f"tolerance, {self.num('other')} have another best token{where}."
        )


def compare_servers(
    a: ScoringSide, b: ScoringSide, prompts: Sequence[list[int]], max_tokens: int, tolerance: Tolerance,
    on_text: Callable[[int], None] = lambda num_texts: None,
) -> ServerDiff:  # fmt: skip
    """A answers greedily; both score prompt and answer. Raises `ValueError` for a request that a side
    refuses or does not answer."""
    found = ServerDiff(tolerance)
    for number, prompt in enumerate(prompts):
        try:
            ids = [*prompt, *a.greedy(prompt, max_tokens)]
            of_a, of_b = (side.score(ids) for side in (a, b))
        except (Malformed, Refused, Unreachable) as error:
            raise ValueError(f"prompt-{number} has no answer: {error}") from None
        found.texts.append(ids)
        for position in sorted(of_a.keys() & of_b.keys()):
            one = compare(number, position, of_a[position], of_b[position], tolerance)
            found.positions.append(replace(one, is_answer=position + 1 >= len(prompt)))
        on_text(number + 1)
    return found


def compare(text: int, position: int, a: Scored, b: Scored, tolerance: Tolerance) -> Compared:
    """The choices are a near tie if each side's gap between the two best tokens is within the tolerance; a
    token that is not in a side's list counts as the last one there."""
    error = None
    if a.logprob is not None and b.logprob is not None and math.isfinite(a.logprob + b.logprob):
        error = abs(a.logprob - b.logprob)
    allowed = BOTH_ERR * tolerance.allowed(0.0 if a.logprob is None else a.logprob)
    choice: Literal["same", "near tie", "other"] = "same"
    if a.best != b.best:
        tie = 2 * BOTH_ERR * tolerance.allowed(a.top[a.best])  # both tokens have an error
        gaps = [
            side.top[side.best] - side.top.get(other.best, min(side.top.values()))
            for side, other in ((a, b), (b, a))
        ]
        choice = "near tie" if max(gaps) <= tie else "other"
    return Compared(text, position, error, allowed, choice, a, b)
