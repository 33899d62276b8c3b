"""What checks in the style of K2's vendor verifier find of the planted faults of a server.

Its measures, on our conversations: the share of finished calls that satisfy their schema (100 %), the F1 of
calls against another run of the reference (0.73), and exact prompt tokens of some requests.

python -m tests.server_check.vendor_style FOLDER OUT.json
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

from diptych.shared.tools.conformance.server.checks import QUICK, Context
from diptych.shared.tools.conformance.server.client import Malformed, Refused
from diptych.shared.tools.conformance.server.conversations import Talk, talks
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.schemas import problem
from diptych.shared.tools.conformance.server.session import connect
from diptych.shared.tools.conformance.server.tool_answers import ToolAnswer, ask
from diptych.shared.tools.conformance.server.tool_parsing import f1
from tests.server_check.faults import load
from tests.server_check.local_server import local_server

NUM_TALKS = 8
LEAST_F1 = 0.73
FINISHED = "tool_calls"


def answers(context: Context, asked: list[Talk], stream: bool) -> list[ToolAnswer | None]:
    """None: the answer cannot be used."""
    found: list[ToolAnswer | None] = []
    for i, talk in enumerate(asked):
        try:
            strict = [{**tool["function"], "strict": True} for tool in talk.tools]
            tools = [{"type": "function", "function": function} for function in strict]
            found.append(ask(context, talk, stream, temperature=0.3, seed=i, max_tokens=100, tools=tools))
        except (Refused, Malformed):
            found.append(None)
    return found


def finds(context: Context, asked: list[Talk], called: list[bool], lengths: list[int | None]) -> str:
    """The measure that a fault violates; empty: none."""
    for stream in (False, True):
        got = answers(context, asked, stream)
        if None in got:
            return "an answer cannot be used"
        for talk, answer in zip(asked, got):
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
            for call in answer.calls if answer.finish_reason == FINISHED else ():
                if problem(call.arguments, schemas.get(call.name, False)):
                    return "schema accuracy"
        if f1(called, [answer.finish_reason == FINISHED for answer in got]) < LEAST_F1:
            return "trigger F1"
        if [answer.num_prompt for answer in got] != lengths:
            return "prompt tokens"
    return ""


def main(folder: str, out: str) -> None:
    with local_server(panel="reference", model=folder) as server:
        context = connect(server.url, folder, dtype="float32", limits=QUICK, oracle=Oracle(folder))
        asked = talks(NUM_TALKS, 7)
        called = [answer is not None and bool(answer.calls) for answer in answers(context, asked, False)]
        lengths = [answer.num_prompt for answer in answers(context, asked, False) if answer is not None]
        assert (found := finds(context, asked, called, lengths)) == "", found
        table = []
        for fault in sorted(chain(*(each.values() for each in load())), key=lambda each: each.name):
            server.proxy.plant(fault.plant)
            by = finds(context, asked, called, lengths)
            server.proxy.plant(None)
            table.append({"check": fault.finder, "what": fault.what, "by": by})
            print(table[-1], flush=True)
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table)
        Path(out).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
