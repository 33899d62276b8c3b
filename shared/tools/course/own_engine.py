"""The capstone: a learner's parts in one engine, graded. Conformance by clauses, a soak with all invariants,
and tokens per second beside both panels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage
from diptych.shared.tools.course.exercise import todos_of
from diptych.shared.tools.course.folder import CourseFolder, State

FILE = "engine.json"
USE_FILE = "engine.use"


@dataclass(frozen=True)
class Part:
    """A stage in the engine: `num_held` of `num_clauses` hold. `failing`: the others, of a written part."""

    stage: str
    title: str
    component: str
    file: str
    state: str  # "used", "replaced" by a later stage of the component, "open" (functions are missing)
    num_clauses: int
    num_held: int = 0
    failing: tuple[str, ...] = ()


@dataclass(frozen=True)
class SoakResult:
    num_answers: int
    num_steps: int
    failure: str = ""  # the first wrong answer or broken invariant


@dataclass(frozen=True)
class Report:
    """What is written to `engine.json`."""

    name: str
    parts: tuple[Part, ...]
    soak: SoakResult
    tokens_per_s: dict[str, float]  # "yours", "reference", "optimized"
    device: str
    author: str = "learner"
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    @property
    def share(self) -> float:
        """Clauses that hold, of the clauses of all stages."""
        return sum(part.num_held for part in self.parts) / sum(part.num_clauses for part in self.parts)

    @property
    def speed(self) -> float:
        """Tokens per second, relative to the reference panel in the same run."""
        return self.tokens_per_s["yours"] / self.tokens_per_s["reference"]

    @property
    def num_used(self) -> int:
        return sum(part.state != "open" for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Report:
        parts = tuple(Part(**{**part, "failing": tuple(part["failing"])}) for part in fields["parts"])
        return cls(**{**fields, "parts": parts, "soak": SoakResult(**fields["soak"])})


def open_functions(folder: CourseFolder, stage: Stage) -> int:
    """How many functions of a file are not written; a file that is missing or no Python counts as one."""
    try:
        return len(todos_of(folder.source_of(stage)))
    except (ValueError, SyntaxError):
        return 1


def chosen_stages(folder: CourseFolder) -> dict[str, Stage]:
    """component -> the stage whose file the engine uses: the last one that is written. An attention backend
    takes the place of a KV cache."""
    chosen = {stage.component: stage for stage in STAGES if not open_functions(folder, stage)}
    if "attention" in chosen:
        chosen.pop("kv_cache", None)
    return chosen


def use_of(folder: CourseFolder) -> dict[str, str]:
    """The choices of the engine, as `--use` takes them."""
    return {
        component: stage.target(str(folder.file_of(stage)))
        for component, stage in chosen_stages(folder).items()
    }


def write_use(folder: CourseFolder) -> None:
    """Write `engine.use`, for `--use @engine.use`. Its files are relative to its folder."""
    lines = [f"{name}={stage.target(stage.skeleton)}" for name, stage in chosen_stages(folder).items()]
    (folder.path / USE_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def graded_parts(
    folder: CourseFolder,
    on_part: Callable[[Part], None],
    on_case: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[Part, ...]:
    """Run every clause of every written stage. Groups that are green with the file as it is are not run."""
    chosen, parts = chosen_stages(folder), []
    for stage in STAGES:
        num_clauses = sum(len(group.clauses) for group in stage.groups)
        state = "used" if chosen.get(stage.component) is stage else "replaced"
        failing: tuple[str, ...] = ()
        num_held = num_clauses
        if open_functions(folder, stage):
            state, num_held = "open", 0
        else:
            failing = failing_clauses(folder, stage, on_case)
            num_held -= len(failing)
        part = Part(
            stage.number, stage.title, stage.component, stage.skeleton, state, num_clauses, num_held, failing
        )
        on_part(part)
        parts.append(part)
    return tuple(parts)


def failing_clauses(
    folder: CourseFolder, stage: Stage, on_case: Callable[[str, int, int], None]
) -> tuple[str, ...]:
    """The clauses that fail. Groups that hold are noted as green."""
    states, source = folder.states(stage), folder.source_of(stage)
    folder.begin(stage)
    known = {clause.name: clause for clause in suite.clauses_of(stage.component)}
    failing: list[str] = []
    for group in stage.groups:
        if states[group.name] is State.GREEN:
            continue
        start, done = time.monotonic(), 0
        clauses = [known[name] for name in group.clauses]
        total = sum(len(clause.cases) for clause in clauses)
        wrong: dict[str, None] = {}
        for verdict in suite.check_component(
            stage.component, stage.target(str(folder.file_of(stage))), clauses=clauses, shrink_failures=False
        ):
            done += 1
            on_case(f"{stage.number} {group.name}", min(done, total), total)
            if not verdict.holds:
                wrong[verdict.clause.name] = None
        is_interface = wrong.keys() - set(group.clauses)  # then no clause of the group was run
        failing += list(group.clauses) if is_interface else list(wrong)
        if wrong:
            folder.fails(stage, group)
        else:
            folder.holds(stage, group, source, time.monotonic() - start, done)
    return tuple(failing)


def soaked(
    use: dict[str, str], seconds: float, on_progress: Callable[[str], None] = lambda what: None
) -> SoakResult:
    """Random load for some seconds: all invariants after every step, and each answer compared with that of
    the request alone in the reference panel."""
    from diptych.shared.tools.conformance.whole_engine.soak import Soak, Tally

    plain = {"speculative": None} if "kv_cache" in use else {}  # it has no masks of trees
    soak = Soak({"use": use, "panel": "reference", **plain})
    total, number, deadline = Tally(), 0, time.monotonic() + seconds
    while number == 0 or time.monotonic() < deadline:
        try:
            total = total.plus(soak.round(number, deadline, on_progress))
        except Exception as error:  # any exception of the learner's code is a failure of the soak
            failure = f"round {number}: {type(error).__name__}: {' '.join(str(error).split())}"
            return SoakResult(total.num_requests, total.num_steps, failure[:400])
        number += 1
    return SoakResult(total.num_requests, total.num_steps)
