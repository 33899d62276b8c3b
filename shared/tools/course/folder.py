"""A learner's folder: the files of the exercises, and `course.json` with what was graded and when."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from diptych.shared.tools.conformance.clauses.stages import STAGES, Group, Stage
from diptych.shared.tools.course.exercise import grade_key, skeleton_of

FILE = "course.json"


class State(Enum):
    """The state of a task."""

    GREEN = "green"  # holds, with the file as it is
    HELD = "held before"  # held with another version of the file
    OPEN = "open"


@dataclass
class StageTimes:
    """Moments in seconds since 1970, as they stand in `course.json`."""

    first_graded: float | None = None
    green: float | None = None  # when all groups held first

    @property
    def minutes(self) -> float | None:
        """From the first grade to the last group; None: not there yet."""
        if self.first_graded is None or self.green is None:
            return None
        return (self.green - self.first_graded) / 60


@dataclass
class CourseFolder:
    path: Path
    grades: dict[str, dict[str, Any]] = field(default_factory=dict)
    """stage -> {"first_graded", "green", "groups": {name: {"key", "seconds", "num_cases"}}}"""
    labs: list[int] = field(default_factory=list)
    """Numbers of the solved labs."""

    @classmethod
    def at(cls, path: Path) -> CourseFolder:
        """The folder with its grades. A folder without `course.json` raises `ValueError`."""
        file = path / FILE
        if not file.is_file():
            where = "this folder" if path == Path() else str(path)
            raise ValueError(
                f"{where} has no {FILE}: `diptych course start FOLDER` makes a folder for the course; "
                "then cd into it, or name it with --folder"
            )
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            return cls(path, kept["stages"], kept["labs"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error!r}): delete it, and start again") from None

    @classmethod
    def start(cls, path: Path) -> tuple[CourseFolder, list[str]]:
        """Make the folder and copy the skeletons that it does not have. Returns the names of those copied;
        a file that is there stays."""
        copied = []
        path.mkdir(parents=True, exist_ok=True)
        for stage in STAGES:
            target = path / stage.skeleton
            if not target.exists():
                target.write_text(skeleton_of(stage).read_text(encoding="utf-8"), encoding="utf-8")
                copied.append(stage.skeleton)
        if (path / FILE).exists():
            return cls.at(path), copied
        folder = cls(path)
        folder.save()
        return folder, copied

    def save(self) -> None:
        text = json.dumps({"stages": self.grades, "labs": self.labs}, indent=1)
        temporary = self.path / f".{FILE}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.path / FILE)  # an interrupted write keeps the old file

    def file_of(self, stage: Stage) -> Path:
        return self.path / stage.skeleton

    def source_of(self, stage: Stage) -> str:
        """The text of the learner's file; a missing one raises `ValueError`."""
        file = self.file_of(stage)
        if not file.is_file():
            raise ValueError(f"no {file}: `diptych course start {self.path}` copies the missing skeletons")
        return file.read_text(encoding="utf-8")

    def states(self, stage: Stage) -> dict[str, State]:
        """name of the group -> state, in teaching order."""
        groups = self.grades.get(stage.number, {}).get("groups", {})
        source = self.source_of(stage) if groups and self.file_of(stage).is_file() else ""
        found = {}
        for group in stage.groups:
            record = groups.get(group.name)
            if record is None:
                found[group.name] = State.OPEN
            else:
                is_same = record["key"] == grade_key(stage, group, source)
                found[group.name] = State.GREEN if is_same else State.HELD
        return found

    def is_green(self, stage: Stage) -> bool:
        return all(state is State.GREEN for state in self.states(stage).values())

    def seconds_of(self, stage: Stage, group: Group) -> float | None:
        """What the last good grade of a group took."""
        record = self.grades.get(stage.number, {}).get("groups", {}).get(group.name)
        return None if record is None else float(record["seconds"])

    def times(self, stage: Stage) -> StageTimes:
        record = self.grades.get(stage.number, {})
        return StageTimes(record.get("first_graded"), record.get("green"))

    def next_stage(self) -> Stage | None:
        """The first stage that is not green; None: the course is done."""
        return next((stage for stage in STAGES if not self.is_green(stage)), None)

    # ---- what grading writes ----

    def begin(self, stage: Stage) -> None:
        """Note the time of the first grade."""
        record = self.grades.setdefault(stage.number, {"groups": {}})
        record.setdefault("first_graded", round(time.time(), 1))
        self.save()

    def holds(self, stage: Stage, group: Group, source: str, seconds: float, num_cases: int) -> None:
        """Note that a group holds with this text of the file."""
        key = grade_key(stage, group, source)
        record = self.grades[stage.number]
        record["groups"][group.name] = {"key": key, "seconds": round(seconds, 2), "num_cases": num_cases}
        if "green" not in record and self.is_green(stage):
            record["green"] = round(time.time(), 1)
        self.save()

    def fails(self, stage: Stage, group: Group) -> None:
        """Forget that a group held."""
        self.grades[stage.number]["groups"].pop(group.name, None)
        self.save()
