"""Planted bugs in the search for stop strings."""

from __future__ import annotations

from unittest.mock import patch

from diptych.reference.scheduler import Scheduler
from diptych.shared.scheduling import stop_conditions
from diptych.shared.text.stop_text import DecodeText
from diptych.shared.types import Req, StepOutput
from tests.conformance.mutants.mutant import mutant_of

correct_tail_text = stop_conditions._tail_text


@mutant_of("scheduler")
class StopWindowCountsTheNewestToken(Scheduler):
    """The window in which a stop string is looked for ends early where the newest token has a long text."""

    def step(self) -> list[StepOutput]:
        with patch.object(stop_conditions, "_tail_text", tail_text):
            return super().step()


def tail_text(req: Req, count: int, num_chars: int, decode_text: DecodeText) -> str:
    newest = req.output_ids[count - 1 : count]
    return correct_tail_text(req, count, num_chars, lambda ids: "" if ids == newest else decode_text(ids))
