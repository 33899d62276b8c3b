"""The results of a comparison of two engines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from diptych.shared.tools.conformance.clauses.closeness import RowError
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.diff.recorder import SAMPLED_IDS, Key


class NearTie(NamedTuple):
    """A choice on which both sides are correct, because allowed errors can change it."""

    steps: tuple[int, int]  # A's, B's
    key: Key
    op: str
    what: str


class SchedulesPart(NamedTuple):
    """The first step at which the two sides' batches differ."""

    step: int
    what: str
    a: object
    b: object


class WorstError(NamedTuple):
    """The largest error among ops of one kind."""

    ratio: float  # ‖a - b‖ / ‖a‖ of one token's row
    op: str
    key: Key
    limit: float  # of the ratio


@dataclass
class Divergence:
    """The first result that differs between the two sides. `found` is None if no tensors were compared:
    schedules differ, a request ended differently, or a side is stuck; `what` says which."""

    labels: tuple[str, str]
    op: str
    kind: str
    what: str = ""
    steps: tuple[int, int] | None = None  # A's, B's, from 1
    forward_mode: str = ""
    key: Key = ("", -1)
    num_prompt_tokens: int = 0
    found: RowError | None = None
    limit: Tolerance | None = None
    keys: list[Key] = field(default_factory=list)  # of the tensors' rows
    tensors: tuple[torch.Tensor, torch.Tensor] | None = None
    token_errors: dict[str, float] = field(default_factory=dict)  # of this token: op -> relative error

    @classmethod
    def of_schedule(cls, part: SchedulesPart, labels: tuple[str, str], forward_mode: str) -> Divergence:
        what = f"{part.what}: {part.a}, not {part.b}"
        steps = (part.step, part.step)
        return cls(labels, "schedule", "schedule", what, steps, forward_mode)

    @classmethod
    def of_run(cls, labels: tuple[str, str], what: str) -> Divergence:
        return cls(labels, "run", "run", what)

    @property
    def layer(self) -> int | None:
        return layer_of(self.op)

    @property
    def rid(self) -> str:
        return self.key[0]

    @property
    def position(self) -> int:
        return self.key[1]

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) for people, the most important first."""
        rows: list[tuple[str, str]] = []
        if self.steps is not None:
            a, b = self.steps
            rows.append(("step", f"{b} ({self.forward_mode})" + (f"; {a} of A" if a != b else "")))
        if self.what:
            rows.append((self.op, self.what))
        if self.found is None:
            return rows
        rows.append(("request", f"{self.rid}, {self._place()}"))
        if self.layer is not None:
            rows.append(("layer", str(self.layer)))
        found = self.found
        rows.append(("op", f"{self.op.partition(f'layers.{self.layer}.')[2] or self.op} ({self.kind})"))
        assert self.tensors is not None
        if found.index:
            rows.append(("index", f"{list(found.index)} of {list(self.tensors[0].shape[1:])}"))
        if self.kind in ("ids", "experts"):
            rows += [("A", str(int(found.a))), ("B", str(int(found.b)))]
            return rows
        rows.append(("A", f"{found.a:.9g}"))
        rows.append(("B", f"{found.b:.9g}"))
        rows.append(("error", f"{found.error:.3g}, allowed {found.allowed:.3g} at this element"))
        assert self.limit is not None
        rows.append(("whole row", f"relative error {found.ratio:.2e}, allowed {self.limit.rms:.2e}"))
        rows.append(("beyond", f"{found.num_beyond} of {found.num_elements} elements of this row"))
        rows.append(("because", self.limit.reason))
        return rows

    def _place(self) -> str:
        number = self.position - self.num_prompt_tokens + 1
        where = f"output token {number}" if number > 0 else f"prompt token {self.position + 1}"
        if self.op == SAMPLED_IDS:
            return f"position {self.position} (what follows {where})"
        return f"position {self.position} ({where})"


@dataclass
class Outcome:
    """How far the comparison got and what it found. The sets name ops that only one side has."""

    labels: tuple[str, str]
    dtype: torch.dtype
    divergence: Divergence | None = None
    near_ties: list[NearTie] = field(default_factory=list)
    schedules_part: SchedulesPart | None = None
    finished: bool = False  # all requests on both sides
    num_steps: tuple[int, int] = (0, 0)
    num_tokens: int = 0  # compared: tokens that both sides computed
    num_one_sided: tuple[int, int] = (0, 0)  # tokens that only one side computed (the other had them cached)
    worst: dict[str, WorstError] = field(default_factory=dict)  # kind of op -> its largest error
    errors: dict[str, float] = field(default_factory=dict)  # op -> its largest error, as executed
    only: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    def note(self, op: str, kind: str, ratio: float, key: Key, limit: float) -> None:
        self.errors[op] = max(self.errors.get(op, 0.0), ratio)
        if kind not in self.worst or ratio > self.worst[kind].ratio:
            self.worst[kind] = WorstError(ratio, op, key, limit)

    def one_sided_ops(self) -> tuple[list[str], list[str]]:
        """The ops that only one side has, with all layers as one name: layers.*.mlp.gate_up_proj."""
        a, b = (sorted({re.sub(r"\blayers\.\d+", "layers.*", op) for op in ops}) for ops in self.only)
        return a, b


def layer_of(op: str) -> int | None:
    match = re.match(r"layers\.(\d+)(\.|$)", op)
    return int(match.group(1)) if match else None
