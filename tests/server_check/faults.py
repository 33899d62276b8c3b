"""The faults that a proxy plants, with the checks that must find them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module

from tests.server_check.faulty_proxy import Ask, Body, Fault, FaultyProxy, Reply

FAULTS: list[Fault] = []
CHAT_CHECKS = (
    "prompt.",
    "tools.",
    "reasoning.",
    "schema.",
    "seeded.",
    "sampling.chat",
    "semantics.unsupported",
)
"""Beginnings of the names of checks that need a model with tools: `test_chat_faults.py` has their faults."""
Play = Callable[[Body, Ask, FaultyProxy], Awaitable[Reply]]


def fault(name: str, sentence: str, check: str) -> Callable[[Play], Play]:
    """Registers a fault. `check`: the name of the check that must fail."""

    def register(play: Play) -> Play:
        FAULTS.append(Fault(name, sentence, check, play))
        return play

    return register


def all_faults() -> list[Fault]:
    for module in ("faults_logprobs", "faults_sampling", "faults_api", "faults_chat", "faults_tools"):
        import_module(f"tests.server_check.{module}")
    return sorted(FAULTS, key=lambda each: each.name)


def changes_request(name: str, sentence: str, check: str) -> Callable[[Callable[[Body], Body | None]], None]:
    """Registers a fault that changes only the request's body: the function returns the fields to replace.
    A field of value None is left out; a returned None changes nothing."""

    def register(change: Callable[[Body], Body | None]) -> None:
        async def play(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
            changed = {**body, **(change(body) or {})}
            return await ask({name: value for name, value in changed.items() if value is not None})

        FAULTS.append(Fault(name, sentence, check, play))

    return register


def changes_reply(
    name: str, sentence: str, check: str
) -> Callable[[Callable[[Body, Reply], None]], Callable[[Body, Reply], None]]:
    """Registers a fault that changes only a good answer, in place."""

    def register(change: Callable[[Body, Reply], None]) -> Callable[[Body, Reply], None]:
        async def play(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
            reply = await ask(body)
            if reply.status == 200:
                change(body, reply)
            return reply

        FAULTS.append(Fault(name, sentence, check, play))
        return change

    return register
