"""The report of a kernel check: verdicts of cases, times, names of mistakes."""

from __future__ import annotations

import ast
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from diptych.shared.tools.conformance.ci_reports import Checked, CiReport
from diptych.shared.tools.conformance.kernels.problem import Convention, Like

NOISE = 0.1
"""The spread of repeated times above which the report warns."""


@dataclass
class Verdict:
    """The verdict on one case. `error`: the norm of the error over the norm of the exact result; `allowed`:
    its limit. `failure`: what is wrong, or None. `refusal`: why the function does not support the case.
    `refused_forms`: form of the inputs, such as strided rows -> why the function does not support it, in a
    case that it supports. `reports`: observations that are not required. `ends_check`: no further case can be
    run. `conduct`: the name of what a kernel must not do, whatever its results are."""

    case: str
    dtype: str
    size: int
    error: float = 0.0
    allowed: float = 0.0
    failure: str | None = None
    refusal: str | None = None
    refused_forms: dict[str, str] = field(default_factory=dict)
    reports: dict[str, bool] = field(default_factory=dict)
    ends_check: bool = False
    conduct: str = ""

    @property
    def words(self) -> str:
        """The verdict as text."""
        if self.failure is not None:
            return self.failure
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        return "; ".join(["holds", *(f"{form} refused: {why}" for form, why in self.refused_forms.items())])


@dataclass
class Timing:
    """Seconds of one call. `ours`: of the function it is compared with. `bound`: bytes over bandwidth or
    FLOPs over rate, whichever is larger. `spread`: how far the quartiles of
    repeated times are apart, over their median."""

    case: str
    size: int
    seconds: float
    ours: float | None
    bound: float | None
    spread: float = 0.0


@dataclass
class Report:
    like: Like
    convention: Convention
    target: str
    device: str
    verdicts: list[Verdict]
    timings: list[Timing]
    names: list[str]  # of mistakes that explain the failures
    num_not_run: int = 0  # cases after one that ended the check, or after its time
    seed: int = 0  # of all inputs
    operators: list[str] = field(default_factory=list)  # of torch, and kernels, in one call
    notes: list[str] = field(default_factory=list)

    @property
    def failing(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.failure is not None]

    @property
    def status(self) -> int:
        """0: every supported case holds; 1: one fails; 2: none could be checked."""
        if self.failing:
            return 1
        return 2 if self.num_not_run or self.num_refused == len(self.verdicts) else 0

    @property
    def num_refused(self) -> int:
        return sum(verdict.refusal is not None for verdict in self.verdicts)

    @property
    def score(self) -> tuple[float, Timing] | None:
        """The geometric mean of bound over time, and the size with the smallest share. None: a case does not
        hold, or there is no bound."""
        shares = [(t.bound / t.seconds, t) for t in self.timings if t.bound and t.seconds > 0]
        if self.status or not shares or len(shares) < len(self.timings):
            return None
        worst = min(shares, key=lambda pair: pair[0])[1]
        return math.exp(sum(math.log(share) for share, _ in shares) / len(shares)), worst

    @property
    def speed(self) -> str:
        """The score in words; empty: there is none."""
        if self.score is None:
            return ""
        mean, worst = self.score
        least = f"{100 * (worst.bound or 0.0) / worst.seconds:.0f} % at {worst.case}"
        return f"speed: {100 * mean:.0f} % of the bound (geometric mean), the least {least}"

    @property
    def timing_notes(self) -> list[str]:
        """Notes on the times."""
        if not self.timings:
            return []
        notes = []
        if self.device.startswith("CPU"):
            notes.append("These are times of a CPU: they do not show how fast a kernel is on a GPU.")
        if (worst := max(timing.spread for timing in self.timings)) > NOISE:
            notes.append(
                f"Repeated times differ by up to {100 * worst:.0f} %: other work runs on this computer. "
                "Smaller differences are noise."
            )
        if all(timing.bound is None for timing in self.timings):
            notes.append("There is no bound: the rate of the links between ranks is not measured.")
        return notes

    @property
    def summary(self) -> str:
        num_cases = len(self.verdicts)
        if self.failing:
            rest = f"; {self.num_not_run} more are not run" if self.num_not_run else ""
            return f"{len(self.failing)} of {num_cases} cases fail{rest}"
        if not num_cases:
            return "nothing was checked: the time of the check was over in the first case"
        if self.num_not_run:
            rest = f"{self.num_not_run} {'is' if self.num_not_run == 1 else 'are'} not run"
            return f"{num_cases} cases hold, {rest}: the time of the check is over"
        if self.num_refused == num_cases:
            return f"all {num_cases} cases are refused: nothing was checked"
        without = Counter(form for verdict in self.verdicts for form in verdict.refused_forms)
        parts = [f"all {num_cases - self.num_refused} cases hold"]
        parts += [f"{count} without {form}" for form, count in without.items()]
        parts += [f"{self.num_refused} are refused"] * bool(self.num_refused)
        return ", ".join(parts)

    def for_ci(self) -> CiReport:
        """One check for each case; what names the failures stands below each."""
        names = [f"what it does: {name}" for name in self.names]
        again = f"--seed {self.seed} repeats it"
        group, path = f"{self.like.name} {self.convention.library}", self.target.partition(":")[0]
        line = line_of(self.target)
        checks = [
            Checked(
                verdict.case,
                f"Every call of {self.like.name} in this case gives the exact result within its tolerance.",
                [] if verdict.failure is None else ["\n".join([verdict.failure, *names, again])],
                path,
                group,
                skipped=verdict.refusal or "" if verdict.failure is None else "",
                line=line,
            )
            for verdict in self.verdicts
        ]
        if self.num_not_run:
            late = f"{self.num_not_run} cases are not run"
            checks.append(Checked("all cases", "All cases are run.", [], path, group, not_run=late))
        facts = {"device": self.device, "seed": str(self.seed), "verdict": self.summary}
        return CiReport(f"diptych check kernel {self.target}", facts, checks)


def line_of(target: str) -> int:
    """The line of `name` in the target file.py:name; 1 if it is not known."""
    path, _, name = target.partition(":")
    try:
        found = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return 1
    return next((each.lineno for each in found if getattr(each, "name", "") == name), 1)
