"""Messages of another process of the engine to the one that has started it."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import msgspec

from diptych.shared.interfaces import SchedulerStats
from diptych.shared.parallel.channel import Refused, decoder
from diptych.shared.parallel.collective_log import Entry
from diptych.shared.types import FinishReason, StepOutput

REASONS = {reason.__name__: reason for reason in FinishReason.__subclasses__()}


class Ready(msgspec.Struct, tag=True):
    """The process has got that far. `value`: what its start gives, as JSON has it, or bytes."""

    value: Any = None


class Report(msgspec.Struct, tag=True):
    """The report of a process about itself, for error messages."""

    stacks: str  # of all its threads
    error: str = ""  # the one that ends it, with its place
    log: list[Entry] = []  # its latest collectives


class StepReport(msgspec.Struct, tag=True):
    """The report of a replica after a step."""

    outputs: list[StepOutput]  # without the reasons of their ends, which are
    reasons: dict[str, tuple[str, list[Any]]]  # by rid: name and fields
    stats: SchedulerStats
    start_times: dict[str, tuple[float, float | None]]  # of requests that are new: arrival, first step

    def all_outputs(self) -> list[StepOutput]:
        """The outputs, with their reasons. Raises `Refused` for a reason that is none."""
        for output in self.outputs:
            if output.rid in self.reasons:
                name, values = self.reasons[output.rid]
                try:
                    output.finished_reason = REASONS[name](*values)
                except (KeyError, TypeError):
                    raise Refused(f"{name!r:.100} is no reason of an end") from None
        return self.outputs


def step_report(
    outputs: list[StepOutput], stats: SchedulerStats, start_times: dict[str, tuple[float, float | None]]
) -> StepReport:
    """The outputs are taken over: their reasons move."""
    reasons: dict[str, tuple[str, list[Any]]] = {}
    for output in outputs:
        if output.finished_reason is not None:
            reason, output.finished_reason = output.finished_reason, None
            reasons[output.rid] = type(reason).__name__, list(astuple(reason))
    return StepReport(outputs, reasons, stats, start_times)


Answer = Ready | Report | StepReport
encode = msgspec.msgpack.Encoder().encode
decode = decoder(Answer)
