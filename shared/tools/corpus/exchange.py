"""What every task of the corpus produces, and the rule that keeps held-out questions apart from training."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple, TypedDict

from diptych.shared.tools.corpus.dice import Dice

HELD_OUT_ONE_IN = 10


class Message(TypedDict):
    role: str
    content: str


class Exchange(NamedTuple):
    """One user turn and the only right answer to it, given the turns before."""

    kind: str
    prompt: str
    answer: str


class Question(NamedTuple):
    """A chat that ends with a user turn, and the exact answer expected."""

    kind: str
    messages: list[Message]
    answer: str


# A task writes the turns of one topic. With held_out, it uses only combinations that training never sees.
Task = Callable[[Dice, bool], list[Exchange]]


def is_held_out(*combination: int | str) -> bool:
    """True for one combination in HELD_OUT_ONE_IN, chosen by a hash, so that the split needs no list.

    A combination is what a question tests: a fact ("went", "Mia", "harbour"), a pair of numbers
    ("sum", 23, 45), a field of a record. Training emits only combinations that are not held out, a held-out
    question is about the others; therefore no question can be in both sets.
    """
    digest = hashlib.blake2s("|".join(str(part) for part in combination).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def to_messages(exchanges: list[Exchange], system: str | None = None) -> list[Message]:
    messages = [Message(role="system", content=system)] if system else []
    for exchange in exchanges:
        messages.append(Message(role="user", content=exchange.prompt))
        messages.append(Message(role="assistant", content=exchange.answer))
    return messages
