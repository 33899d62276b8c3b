"""The workloads of `diptych bench serve`: conversations of one or more turns."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, ClassVar, NamedTuple

from diptych.shared.tools.bench.workloads import Offline256, Range, SharedPrefix, Uniform

CHARS_PER_TOKEN = 4
"""Of a recorded answer, whose length in tokens depends on a tokenizer that a client does not have."""


class Turn(NamedTuple):
    """One request. Token ids go to /v1/completions, a text as a user's message to /v1/chat/completions; both
    behind the turns before and their answers."""

    prompt: list[int] | str
    output_len: int
    think_time: float = 0.0  # seconds from the answer before to this request


Conversation = list[Turn]
"""The turns of one client. Each is sent after the previous answer, with the history."""


class _Numbers:
    """Checks the numbers of a workload. Errors name the option."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            option = "--" + name.replace("_", "-")
            if isinstance(value, tuple) and not 1 <= value[0] <= value[1]:
                got = f"{value[0]}-{value[1]}"
                raise ValueError(f"{option} must be a length of at least 1, or two in order, got {got}")
            if name == "think_time" and not 0 <= value < math.inf:
                raise ValueError(f"{option} must be 0 or more seconds, got {value}")
            if type(value) is int and name not in ("seed", "think_time") and value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}")


@dataclass(frozen=True)
class RandomPrompts(_Numbers):
    """Random token ids; lengths uniform in their ranges."""

    name: ClassVar[str] = "random"
    num_requests: int = 64
    input_len: Range = (256, 256)
    output_len: Range = (64, 64)
    seed: int = 0

    def conversations(self, vocab_size: int) -> list[Conversation]:
        workload = Offline256(self.num_requests, self.input_len, self.output_len, seed=self.seed)
        return [[Turn(*request)] for request in workload.cases(vocab_size)[0].requests]


@dataclass(frozen=True)
class SharedPrefixes(_Numbers):
    """Groups of requests that share the beginning of their prompts, in random order."""

    name: ClassVar[str] = "shared-prefix"
    groups: int = 8
    group_size: int = 8
    shared_len: int = 512
    input_len: Range = (64, 64)  # tokens behind the shared ones
    output_len: Range = (64, 64)
    seed: int = 0

    def conversations(self, vocab_size: int) -> list[Conversation]:
        workload = SharedPrefix(
            self.groups, self.group_size, self.shared_len, self.input_len, self.output_len, seed=self.seed
        )
        return [[Turn(*request)] for request in workload.cases(vocab_size)[0].requests]


@dataclass(frozen=True)
class MultiTurn(_Numbers):
    """Chats whose history grows by each question and its answer."""

    name: ClassVar[str] = "multi-turn"
    num_requests: int = 16  # conversations
    num_turns: int = 4
    input_len: Range = (32, 32)  # letters of a question, about one token each
    output_len: Range = (32, 32)
    seed: int = 0

    def conversations(self, vocab_size: int) -> list[Conversation]:
        dice = random.Random(self.seed)
        return [
            [
                Turn(
                    " ".join(dice.choices(ascii_lowercase, k=dice.randint(*self.input_len))),
                    dice.randint(*self.output_len),
                )
                for _ in range(self.num_turns)
            ]
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True)
class Agents(_Numbers):
    """Agents at work: a long first prompt, with instructions and files, then turns whose new tokens are the
    answer before and the result of a tool. All are token ids: a chat template, or tokenizing an answer's text
    again, would change how many tokens the prefix cache finds."""

    name: ClassVar[str] = "agents"
    num_requests: int = 16  # conversations
    num_turns: int = 12  # behind the first
    input_len: Range = (700, 700)  # tokens of a tool's result
    output_len: Range = (100, 100)
    first_len: Range = (50_000, 50_000)
    think_time: float = 0.0
    seed: int = 0

    def conversations(self, vocab_size: int) -> list[Conversation]:
        """Conversations that differ in the first token, so that they share no prefix."""
        dice = random.Random(self.seed)
        firsts = Uniform((self.num_requests,), self.first_len, self.output_len, seed=self.seed)
        return [
            [
                Turn(*first),
                *(
                    Turn(
                        dice.choices(range(vocab_size), k=dice.randint(*self.input_len)),
                        dice.randint(*self.output_len),
                        self.think_time,
                    )
                    for _ in range(self.num_turns)
                ),
            ]
            for first in firsts.cases(vocab_size)[0].requests
        ]


@dataclass(frozen=True)
class ShareGpt(_Numbers):
    """The first questions of recorded chats in ShareGPT's format; answers are as long as the recorded
    ones."""

    name: ClassVar[str] = "sharegpt"
    file: Path | None = None
    num_requests: int = 64
    seed: int = 0

    def conversations(self, vocab_size: int) -> list[Conversation]:
        if self.file is None:
            raise ValueError("the workload sharegpt needs --file")
        turns = [turn for chat in _read(self.file) if (turn := _first_turn(chat)) is not None]
        if not turns:
            raise ValueError(f"{self.file} has no chat in which a human begins and the model answers")
        dice = random.Random(self.seed)
        chosen = dice.sample(turns, min(self.num_requests, len(turns)))
        return [[turn] for turn in chosen]


ServeWorkload = RandomPrompts | SharedPrefixes | MultiTurn | Agents | ShareGpt
SERVE_WORKLOADS: dict[str, type[ServeWorkload]] = {
    each.name: each for each in (RandomPrompts, SharedPrefixes, MultiTurn, Agents, ShareGpt)
}


def _read(file: Path) -> list[Any]:
    try:
        chats = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read chats from {file}: {error}") from None
    if not isinstance(chats, list):
        raise ValueError(f"{file} must hold a JSON list of chats, got {type(chats).__name__}")
    return chats


def _first_turn(chat: Any) -> Turn | None:
    """The first question and the length of its answer; None for a record of another form."""
    said = chat.get("conversations") if isinstance(chat, dict) else None
    if not isinstance(said, list) or len(said) < 2 or not all(isinstance(each, dict) for each in said[:2]):
        return None
    question, answer = said[0].get("value"), said[1].get("value")
    if said[0].get("from") not in ("human", "user") or not question or not answer:
        return None
    return Turn(str(question), max(1, len(str(answer)) // CHARS_PER_TOKEN))
