"""The workloads of `diptych bench serve`: conversations of one or more turns."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, ClassVar, NamedTuple

from diptych.shared.tools.bench.workloads import Offline256, Range, SharedPrefix

CHARS_PER_TOKEN = 4
"""Of a recorded answer, whose length in tokens depends on a tokenizer that a client does not have."""


class Turn(NamedTuple):
    """One request. Token ids go to /v1/completions, a text as a user's message to /v1/chat/completions."""

    prompt: list[int] | str
    output_len: int


Conversation = list[Turn]
"""The turns of one client. Each is sent after the previous answer, with the history."""


@dataclass(frozen=True)
class RandomPrompts:
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
class SharedPrefixes:
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
class MultiTurn:
    """Chats whose history grows by each question and its answer."""

    name: ClassVar[str] = "multi-turn"
    num_requests: int = 16  # conversations
    num_turns: int = 4
    input_len: Range = (32, 32)  # letters of a question, about one token each
    output_len: Range = (32, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("input_len", "output_len"):
            least, greatest = getattr(self, name)
            if not 1 <= least <= greatest:
                raise ValueError(f"{name} must be a length of at least 1, or two in order")

    @property
    def lengths(self) -> list[Range]:
        """Lengths of the questions of a conversation."""
        return [self.input_len] * self.num_turns

    def conversations(self, vocab_size: int) -> list[Conversation]:
        dice = random.Random(self.seed)
        return [
            [
                Turn(
                    " ".join(dice.choices(ascii_lowercase, k=dice.randint(*lengths))),
                    dice.randint(*self.output_len),
                )
                for lengths in self.lengths
            ]
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True)
class Agents(MultiTurn):
    """Agents at work: a long first question, with instructions and files, then results of tools."""

    name: ClassVar[str] = "agents"
    num_requests: int = 4
    num_turns: int = 12
    input_len: Range = (700, 700)
    output_len: Range = (100, 100)
    first_len: Range = (50_000, 50_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.first_len[0] <= self.first_len[1]:
            raise ValueError("first_len must be a length of at least 1, or two in order")

    @property
    def lengths(self) -> list[Range]:
        return [self.first_len, *super().lengths[1:]]


@dataclass(frozen=True)
class ShareGpt:
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
