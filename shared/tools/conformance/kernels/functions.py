"""What a call of the function under check gives, and a function in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.kernels.problem import Call
from diptych.shared.tools.conformance.kernels.watched_call import Watch, invoke


class Raised(Exception):
    """An exception of the function. `kind`: its type; `place`: file and line."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.kind, self.place = text.partition(":")[0], place


class Ended(Mismatch):
    """The process of the function has ended, or cannot go on."""


class Mistake(NamedTuple):
    """`name`: the same in every case with this mistake. `detail`: of one case."""

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


class Other:
    """What a function returns that is no tensor."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass
class Outcome:
    """`value`: what is returned, in tuples, with dense copies of tensors. `wrong`: what the function does
    besides computing. `modified`: the inputs that it has changed."""

    value: Any
    wrong: list[str] = field(default_factory=list)
    modified: list[str] = field(default_factory=list)


def tensors_of(made: Call) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in (*((f"argument {i}", each) for i, each in enumerate(made.args)), *made.kwargs.items()):
        values = value if isinstance(value, tuple) else (value,)
        found += [(name, each) for each in values if isinstance(each, torch.Tensor)]
    return found


@cache
def _watch() -> Watch:
    return Watch()


class LocalFunction:
    """A function in this process, for tests: one that attacks its checker needs `ChildFunction`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._held: Call | None = None

    def call(self, made: Call, is_same: bool = False) -> Outcome:
        """`is_same`: in the memory of the call before, with the contents of `made`. The function gets copies
        of the tensors, which nothing else uses."""
        held = in_other_memory(made) if self._held is None or not is_same else in_memory_of(self._held, made)
        pairs = [(a[1], b[1]) for a, b in zip(tensors_of(held), tensors_of(made))]
        for mine, theirs in pairs:
            memory_as_bytes(mine).copy_(memory_as_bytes(theirs))
        value, wrong = invoke(_watch(), self.function, held.args, held.kwargs)
        modified = []
        for (name, theirs), (mine, _) in zip(tensors_of(made), pairs):
            if any(theirs is each for each in made.written):
                memory_as_bytes(theirs).copy_(memory_as_bytes(mine))
            elif not same_bytes(memory_as_bytes(mine), memory_as_bytes(theirs)):
                modified.append(name)
        self._held = held
        return Outcome(value, wrong, modified)


def in_other_memory(made: Call) -> Call:
    """Arguments of the same form in other memory, whose contents are not copied. Tensors that share a storage
    share the other one too."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(copied(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if (key := storage.data_ptr() or id(value)) not in storages:
            storages[key] = torch.UntypedStorage(storage.nbytes(), device=storage.device)
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(storages[key], value.storage_offset(), value.shape, value.stride())

    args = tuple(copied(each) for each in made.args)
    return Call(args, {name: copied(each) for name, each in made.kwargs.items()})


def in_memory_of(held: Call, made: Call) -> Call:
    """The tensors of a call, and the other arguments of a second one of the same form."""

    def joined(mine: Any, theirs: Any) -> Any:
        if isinstance(theirs, tuple):
            return tuple(joined(*pair) for pair in zip(mine, theirs))
        return mine if isinstance(theirs, torch.Tensor) else theirs

    kwargs = {name: joined(held.kwargs[name], each) for name, each in made.kwargs.items()}
    return Call(joined(held.args, made.args), kwargs)


def memory_as_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8: the storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two uint8 tensors are equal. Eight bytes are compared at a time where that is possible."""
    if len(a) == len(b) and len(a) % 8 == 0 and a.data_ptr() % 8 == b.data_ptr() % 8 == 0:
        a, b = a.view(torch.int64), b.view(torch.int64)
    return torch.equal(a, b)
