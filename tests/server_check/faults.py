"""The faults that a proxy plants, with the checks that must find them: `load` registers all of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from tests.planted import Bugs
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Play, Reply

SERVER, CHAT = Bugs("server"), Bugs("chat")
"""CHAT: those whose checks need a model with tools."""
OF_CHAT = "prompt.", "tools.", "reasoning.", "schema.", "seeded.", "sampling.chat", "semantics.unsupported"
"""Beginnings of the names of these checks."""


def fault(name: str, what: str, check: str, where: str = "its requests") -> Callable[[Play], Play]:
    """Registers a fault. `check`: the name of the check that must fail."""

    def register(play: Play) -> Play:
        bugs = CHAT if check.startswith(OF_CHAT) else SERVER
        bugs.add(name, play, what, where=where, finder=check)
        return play

    return register


def changes_request(name: str, what: str, check: str) -> Callable[[Callable[[Body], Body | None]], None]:
    """Registers a fault that changes only the request's body: the function returns the fields to replace.
    A field of value None is left out; a returned None changes nothing."""

    def register(change: Callable[[Body], Body | None]) -> None:
        async def play(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
            changed = {**body, **(change(body) or {})}
            return await ask({name: value for name, value in changed.items() if value is not None})

        fault(name, what, check)(play)

    return register


def changes_reply(
    name: str, what: str, check: str
) -> Callable[[Callable[[Body, Reply], None]], Callable[[Body, Reply], None]]:
    """Registers a fault that changes only a good answer, in place."""

    def register(change: Callable[[Body, Reply], None]) -> Callable[[Body, Reply], None]:
        async def play(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
            reply = await ask(body)
            if reply.status == 200:
                change(body, reply)
            return reply

        fault(name, what, check, "its answers")(play)
        return change

    return register


def load() -> tuple[Bugs, Bugs]:
    """All faults: SERVER, CHAT."""
    for module in ("faults_logprobs", "faults_sampling", "faults_api", "faults_chat", "faults_tools"):
        import_module(f"tests.server_check.{module}")
    return SERVER, CHAT
