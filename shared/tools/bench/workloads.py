"""Workloads of the engine benchmarks: prompts of random token ids, and output lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

Range = tuple[int, int]
"""Minimum and maximum, both included."""

NUM_RANDOM_IDS = 10_001
"""Ids are drawn below this for any vocabulary, so that lengths do not depend on the model."""


def check_least(case: object, **least: int) -> None:
    """Raise `ValueError` for a field below its least value."""
    for name, number in least.items():
        if getattr(case, name) < number:
            raise ValueError(
                f"{name.removeprefix('num_')} must be at least {number}, got {getattr(case, name)}"
            )


class Request(NamedTuple):
    prompt: list[int]
    output_len: int


class Case(NamedTuple):
    """Requests that are submitted together."""

    name: str
    requests: list[Request]


@dataclass(frozen=True)
class Offline256:
    """256 concurrent requests, lengths of prompts and answers uniform from 100 to 1,024. The
    order of the draws is the one that public benchmarks of small engines use: with seed 0 it gives 142,827
    tokens of prompts and 133,966 of answers."""

    name: ClassVar[str] = "offline-256"
    num_requests: int = 256
    input_len: Range = (100, 1024)
    output_len: Range = (100, 1024)
    temperature: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def cases(self, vocab_size: int) -> list[Case]:
        dice = random.Random(self.seed)
        prompts = []
        for _ in range(self.num_requests):
            length = dice.randint(*self.input_len)
            prompts.append([dice.randrange(NUM_RANDOM_IDS) % vocab_size for _ in range(length)])
        requests = [Request(prompt, dice.randint(*self.output_len)) for prompt in prompts]
        return [Case(f"{self.num_requests} requests", requests)]


@dataclass(frozen=True)
class Uniform:
    """Requests of equal lengths at each concurrency, without a common prefix."""

    name: ClassVar[str] = "uniform"
    concurrency: tuple[int, ...] = (1, 16)
    input_len: Range = (32, 32)
    output_len: Range = (128, 128)
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def cases(self, vocab_size: int) -> list[Case]:
        found = []
        for concurrency in self.concurrency:
            dice = random.Random(f"{self.seed}-{concurrency}")
            firsts = _distinct(dice, concurrency, vocab_size)
            requests = [_request(dice, [first], self, vocab_size) for first in firsts]
            found.append(Case(f"concurrency {concurrency}", requests))
        return found


@dataclass(frozen=True)
class SharedPrefix:
    """Groups of requests that share the beginning of their prompts, in random order."""

    name: ClassVar[str] = "shared-prefix"
    groups: int = 64
    group_size: int = 16
    shared_len: int = 2048
    input_len: Range = (128, 128)  # tokens of its own, behind the shared ones
    output_len: Range = (128, 128)
    temperature: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def cases(self, vocab_size: int) -> list[Case]:
        dice = random.Random(self.seed)
        requests = []
        for first in _distinct(dice, self.groups, vocab_size):
            shared = [first, *_ids(dice, self.shared_len - 1, vocab_size)]
            for own in _distinct(dice, self.group_size, vocab_size):
                requests.append(_request(dice, [*shared, own], self, vocab_size))
        dice.shuffle(requests)
        return [Case(f"{self.groups} groups of {self.group_size}", requests)]

    def ideal_hit_rate(self, requests: list[Request], page_size: int) -> float:
        """The share of prompt tokens that a cache can provide: in each group all requests but one find the
        whole pages of the shared prefix."""
        cached = self.groups * (self.group_size - 1) * (self.shared_len // page_size * page_size)
        return cached / sum(len(request.prompt) for request in requests)


@dataclass(frozen=True)
class LongPrompts:
    """Requests that decode while long prompts arrive."""

    name: ClassVar[str] = "long-prompts"
    num_requests: int = 32
    input_len: Range = (512, 512)
    output_len: Range = (16_384, 16_384)  # long enough to last to the end
    long_len: int = 8192
    long_output_len: int = 16
    interval: float = 1.0  # seconds from one long prompt to the next
    seconds: float = 10.0  # of measuring, with and without long prompts
    temperature: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def cases(self, vocab_size: int) -> list[Case]:
        """The requests that decode, and the long ones in the order of their arrival."""
        dice = random.Random(self.seed)
        firsts = _distinct(dice, self.num_requests, vocab_size)
        running = [_request(dice, [first], self, vocab_size) for first in firsts]
        num_long = -int(-self.seconds // self.interval)
        long = [Request(_ids(dice, self.long_len, vocab_size), self.long_output_len) for _ in range(num_long)]
        return [Case("running", running), Case("long", long)]


Workload = Offline256 | Uniform | SharedPrefix | LongPrompts
WORKLOADS: dict[str, type[Workload]] = {
    each.name: each for each in (Offline256, SharedPrefix, LongPrompts, Uniform)
}


def _ids(dice: random.Random, length: int, vocab_size: int) -> list[int]:
    return [dice.randrange(vocab_size) for _ in range(length)]


def _request(
    dice: random.Random, start: list[int], workload: Uniform | SharedPrefix | LongPrompts, vocab_size: int
) -> Request:
    """A prompt that begins with `start`, whose last token distinguishes it from other prompts."""
    own_len = dice.randint(*workload.input_len)
    return Request(start + _ids(dice, own_len - 1, vocab_size), dice.randint(*workload.output_len))


def _distinct(dice: random.Random, count: int, vocab_size: int) -> list[int]:
    """Distinct first tokens for prompts that must differ there."""
    if count > vocab_size:
        raise ValueError(f"{count} prompts that differ in one token need a vocabulary of that size")
    return dice.sample(range(vocab_size), count)


def _check(workload: Workload) -> None:
    for name, value in vars(workload).items():
        if name in ("input_len", "output_len") and not 1 <= value[0] <= value[1]:
            raise ValueError(f"{name} must be a length of at least 1, or two in order, got {value}")
        if name == "output_len" and isinstance(workload, LongPrompts) and value[0] < 3:
            raise ValueError(f"output_len of requests that decode must be at least 3, got {value}")
        if name == "concurrency" and (not value or min(value) < 1):
            raise ValueError(f"concurrency must list numbers of at least 1, got {value}")
        if name in ("interval", "seconds") and not value > 0:
            raise ValueError(f"{name} must be more than 0 seconds, got {value}")
        if type(value) is int and name != "seed" and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
