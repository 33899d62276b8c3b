"""Clients of a server whose processes are killed. An answer is that of the reference, or a beginning of it
with an error behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams

PROMPTS = (
    "What is 12 + 30?", "What is 20 - 6?", "Count from 3 to 9.", "Count from 1 to 30.",
    "Mara lives in Bergen. Mara works as a baker. Otto bought 12 eggs. In which city does Mara live?",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
KINDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 4},
    {"max_tokens": 60},
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 40, "guided_json": SCHEMA},
)
NUM_CLIENTS = 4
HANG_SECONDS = 60.0
"""Time limit of an answer."""
NEAR = 0.01
"""Of two log-probabilities."""
UNAVAILABLE = 503


@dataclass(frozen=True)
class Question:
    """A body of /v1/completions, and the whole text of its answer."""

    body: dict[str, Any]
    text: str


def questions(model: str) -> list[Question]:
    """Greedy requests, long and short, free and constrained, and what the reference answers to each alone."""
    llm = LLM(
        model, panel="reference", device="cpu", dtype="float32", max_total_tokens=1024,
        disable_radix_cache=True, max_running_requests=1,
    )  # fmt: skip
    found = []
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 4},
        {"max_tokens": 60, "ignore_eos": True},
        {"max_tokens": 60},
    ]
    for text, kind in itertools.product(PROMPTS, [*kinds, {"max_tokens": 40, "guided_json": SCHEMA}]):
        prompt = llm.chat_prompt([{"role": "user", "content": text}])
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=kind["max_tokens"],
            ignore_eos=kind.get("ignore_eos", False),
            json_schema=kind.get("guided_json"),
            return_logprob=True,
            top_logprobs_num=2,
        )
        answer = llm.generate(prompt, params, progress=False)
        assert not isinstance(answer, list)
        tops = [entry.top for entry in answer.output_logprobs]
        if all(top[0][1] - top[1][1] > NEAR for top in tops):  # else another order of sums could decide
            found.append(Question({"prompt": prompt, "temperature": 0.0, **kind}, answer.text))
    return found


class Clients:
    """Threads that ask, and compare. `problems`: what must never happen; `num_failed`: requests that got an
    error or no end."""

    def __init__(self, url: str, asked: list[Question], seed: int) -> None:
        self.url = url
        self.asked = asked
        self.problems: list[str] = []
        self.num_answers = self.num_failed = 0
        self.last_failure = ""
        self._numbers = itertools.count(seed * 1_000_000)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._num_ended = [0] * NUM_CLIENTS  # requests of each thread
        self._threads = [
            threading.Thread(target=self._run, args=(i, random.Random(f"{seed} {i}")), daemon=True)
            for i in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * HANG_SECONDS)
            if thread.is_alive():
                self.problems.append("a client waits for ever")

    def wait(self, num_more: int) -> None:
        """Until so many more answers are right, and every request that waits now has ended. Raises
        `AssertionError` if they do not come."""
        wanted, end = self.num_answers + num_more, time.monotonic() + 2 * HANG_SECONDS
        before = self._num_ended.copy()
        while self.num_answers < wanted or any(a == b for a, b in zip(before, self._num_ended)):
            assert not self.problems, self.problems[:5]
            assert time.monotonic() < end, f"no {num_more} answers; last failure: {self.last_failure}"
            time.sleep(0.02)

    def ask_constrained(self) -> None:
        """A request of its own with a new grammar. All grammars before it have been compiled then."""
        question = self._new(next(each for each in self.asked if "guided_json" in each.body))
        with httpx.Client(base_url=self.url, timeout=HANG_SECONDS, trust_env=False) as client:
            assert self._ask_whole(client, question, random.Random(0)), self.last_failure

    def _run(self, number: int, rng: random.Random) -> None:
        with httpx.Client(base_url=self.url, timeout=HANG_SECONDS, trust_env=False) as client:
            while not self._is_over.is_set():
                question, is_answered = self._new(rng.choice(self.asked)), False
                try:
                    ask = rng.choice([self._ask_whole, self._ask_stream, self._ask_stream, self._leave])
                    is_answered = ask(client, question, rng)
                except httpx.TimeoutException as error:
                    self.problems.append(f"{type(error).__name__} after {HANG_SECONDS:g} s: {question.body}")
                except httpx.TransportError as error:
                    self.last_failure = repr(error)
                except Exception as error:
                    self.problems.append(f"{question.body}: {error!r}")
                with self._lock:
                    self.num_answers += is_answered
                    self.num_failed += not is_answered
                    self._num_ended[number] += 1
                if not is_answered:
                    time.sleep(0.05)

    def _new(self, question: Question) -> Question:
        """A schema that no cache has: with another title."""
        schema = question.body.get("guided_json")
        if schema is None:
            return question
        titled = {**schema, "title": f"number {next(self._numbers)}"}
        return replace(question, body={**question.body, "guided_json": titled})

    def _ask_whole(self, client: httpx.Client, question: Question, rng: random.Random) -> bool:
        n = rng.choice([1, 1, 2])
        answer = client.post("/v1/completions", json={**question.body, "n": n})
        if not self._is_good(answer, answer.content):
            return False
        for choice in answer.json()["choices"]:
            self._compare(question, choice["text"], is_whole=True)
        return True

    def _ask_stream(self, client: httpx.Client, question: Question, rng: random.Random) -> bool:
        text, is_whole = "", False
        with client.stream("POST", "/v1/completions", json={**question.body, "stream": True}) as answer:
            if not self._is_good(answer, b"" if answer.status_code == 200 else answer.read()):
                return False
            with contextlib.suppress(httpx.TransportError):
                for chunk in _chunks(answer):
                    if "error" in chunk:
                        self.last_failure = str(chunk)
                        break
                    text += chunk["choices"][0]["text"]
                    is_whole |= chunk["choices"][0]["finish_reason"] is not None
        self._compare(question, text, is_whole)
        return is_whole

    def _leave(self, client: httpx.Client, question: Question, rng: random.Random) -> bool:
        """Leave in the middle of the answer."""
        with client.stream("POST", "/v1/completions", json={**question.body, "stream": True}) as answer:
            if not self._is_good(answer, b"" if answer.status_code == 200 else answer.read()):
                return False
            for _ in zip(range(rng.randrange(3)), _chunks(answer)):
                pass
        return True

    def _is_good(self, answer: httpx.Response, content: bytes) -> bool:
        if answer.status_code not in (200, UNAVAILABLE):
            self.problems.append(f"status {answer.status_code}: {content[:300]!r}")
        if answer.status_code != 200:
            self.last_failure = content[:300].decode(errors="replace")
        return answer.status_code == 200

    def _compare(self, question: Question, text: str, is_whole: bool) -> None:
        if text != question.text and (is_whole or not question.text.startswith(text)):
            self.problems.append(f"{question.body}: {text!r} instead of {question.text!r}")


def _chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
