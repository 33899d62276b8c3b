"""Saves time in the start of a process that is about to import torch and start one engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any


@contextmanager
def quick_start() -> Iterator[None]:
    """For imports and the start of an engine. Without garbage collection: nearly all objects live on, and
    looking at them again and again took a tenth of the time. Where transformers lists all installed packages
    when it is imported, it gets a `Distributions`."""
    was_on, read_all = gc.isenabled(), metadata.packages_distributions
    gc.disable()
    metadata.packages_distributions = lambda: Distributions(read_all)
    try:
        yield
    finally:
        metadata.packages_distributions = read_all
        if was_on:
            gc.enable()


class Distributions(dict[str, list[str]]):
    """Name of a package -> those of the distributions that have it. Most have the same name, which is quickly
    looked up; for another one `read_all` reads the files of all that is installed."""

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        super().__init__()
        self._read_all = read_all

    def __missing__(self, name: str) -> list[str]:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            self.update(self._read_all())
            if name not in self:
                raise KeyError(name) from None
            return self[name]
        return [name]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default
