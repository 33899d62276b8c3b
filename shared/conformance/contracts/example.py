"""The case of a clause that has one worked example and nothing to vary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    name: str = "example"


EXAMPLE = (Example(),)
