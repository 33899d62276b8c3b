"""Stages of the course: a component, the file to complete, and its clauses in teaching order, with hints.

`diptych check --stage 05 my_cache.py` checks the groups in this order and stops at the first that fails.
Every clause of a staged component is in exactly one group (`tests/docs/test_stages.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Group:
    """Clauses that hold once one part of the exercise is complete."""

    name: str
    clauses: tuple[str, ...]
    hint: str
    hints: Mapping[str, str]  # of clauses that have one of their own: it names the wrong idea

    def hint_of(self, clause: str) -> str:
        """What to say when this clause fails."""
        return self.hints.get(clause, self.hint)


@dataclass(frozen=True)
class Stage:
    number: str  # "05"
    title: str
    page: str  # of docs/course
    component: str  # of diptych.shared.registry
    skeleton: str  # file of docs/exercises
    class_name: str  # in the learner's file; "": the file is a module of classes
    groups: tuple[Group, ...]

    @property
    def skeleton_path(self) -> str:
        return f"docs/exercises/{self.skeleton}"

    def target(self, file: str) -> str:
        """The learner's file, as `diptych.shared.registry` loads it."""
        return f"{file}:{self.class_name}" if self.class_name else file


def _stage(fields: dict[str, Any]) -> Stage:
    groups = [
        Group(group["name"], tuple(group["clauses"]), group["hint"], group.get("hints", {}))
        for group in fields["groups"]
    ]
    return Stage(**{**fields, "groups": tuple(groups)})


STAGES = tuple(map(_stage, json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))))
"""By number; stages.json has the table."""


def stage_of(number: str) -> Stage:
    """The stage of a number, such as "05" or "5"; an unknown one raises `ValueError` listing the known."""
    for stage in STAGES:
        if stage.number == number.zfill(2):
            return stage
    known = ", ".join(f"{stage.number} ({stage.title})" for stage in STAGES)
    raise ValueError(f"no exercise for stage {number!r}; there are exercises for {known}")
