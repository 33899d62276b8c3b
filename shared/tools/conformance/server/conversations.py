"""Conversations with tools, from a seed: requests that need a tool, and others that need none."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

JSON = dict[str, Any]
CITIES = ("Bergen", "Lisbon", "Osaka", "Quito", "Dakar", "Perth", "Turin", "Halifax", "Kiel", "Split")
ROOMS = ("kitchen", "hall", "garden", "attic", "library", "studio")
PEOPLE = ("Mara", "Tom", "Ines", "Paul", "Nora", "Felix", "Rosa", "Karl")
PLAIN = ("What is {first} + {second}?", "How much is {first} + {second}?")
NOTES = ("the train is late", "call me back", "the key is in the box", "dinner is at eight", "bring the map")


class Kind(NamedTuple):
    """A tool, and a request that needs it. `wanted`: how a user asks, with the arguments in braces."""

    name: str
    description: str
    properties: JSON
    wanted: tuple[str, ...]


KINDS = (
    Kind(
        "get_weather",
        "Weather of a city.",
        {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        ("What is the weather in {city} for {days} days?", "Weather for {days} days in {city}, please."),
    ),
    Kind(
        "set_light",
        "Sets the light of a room.",
        {"room": {"enum": list(ROOMS)}, "level": {"type": "integer", "minimum": 0, "maximum": 99}},
        ("Set the light in the {room} to {level}.", "Please put the {room} light at {level}."),
    ),
    Kind(
        "send_note",
        "Sends a note to a person.",
        {"name": {"type": "string"}, "text": {"type": "string"}},
        ('Send {name} the note "{text}".', 'Write to {name}: "{text}".'),
    ),
    Kind(
        "find_train",
        "Trains between two cities.",
        {"start": {"type": "string"}, "end": {"type": "string"}},
        ("Which train goes from {start} to {end}?", "Find a train from {start} to {end}."),
    ),
)


class Talk(NamedTuple):
    """A conversation that ends with a user's message. `call`: name and arguments that the request asks for;
    None: it needs no tool. `answer`: then a right one."""

    messages: list[JSON]
    tools: list[JSON]
    call: tuple[str, JSON] | None
    answer: str = ""


def tool_of(kind: Kind) -> JSON:
    """The tool as the API takes it. All arguments are required, and no others are allowed."""
    schema = {
        "type": "object",
        "properties": kind.properties,
        "required": list(kind.properties),
        "additionalProperties": False,
    }
    function = {"name": kind.name, "description": kind.description, "parameters": schema}
    return {"type": "function", "function": function}


def values_of(kind: Kind, rng: random.Random) -> JSON:
    """Arguments that satisfy the tool's schema."""
    start, end = rng.sample(CITIES, 2)
    values: JSON = {
        "city": start, "start": start, "end": end, "room": rng.choice(ROOMS), "name": rng.choice(PEOPLE),
        "text": rng.choice(NOTES), "days": rng.randint(1, 9), "level": rng.randint(0, 99),
    }  # fmt: skip
    return {name: values[name] for name in kind.properties}


def request_of(kind: Kind, rng: random.Random) -> tuple[str, JSON]:
    """A user's request and the arguments that it asks for."""
    values = values_of(kind, rng)
    return rng.choice(kind.wanted).format(**values), values


def talk(rng: random.Random, needs_call: bool | None = None) -> Talk:
    """One or two tools, and a request that needs one of them or none; None: either."""
    kinds = rng.sample(KINDS, rng.randint(1, 2))
    tools = [tool_of(kind) for kind in kinds]
    if needs_call or (needs_call is None and rng.random() < 0.5):
        kind = rng.choice(kinds)
        text, values = request_of(kind, rng)
        return Talk([{"role": "user", "content": text}], tools, (kind.name, values))
    first, second = rng.randint(10, 49), rng.randint(10, 49)
    asked = {"role": "user", "content": rng.choice(PLAIN).format(first=first, second=second)}
    return Talk([asked], tools, None, f"{first} + {second} = {first + second}")


def talks(num: int, seed: int) -> list[Talk]:
    """Conversations of which every other one needs a call."""
    rng = random.Random(seed)
    return [talk(rng, i % 2 == 0) for i in range(num)]


def call_message(call_id: str, name: str, arguments: JSON, content: str | None = None) -> JSON:
    """A message of the assistant with one call, as the API has it: arguments are JSON text."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": content, "tool_calls": [_entry(call_id, function)]}


def _entry(call_id: str, function: JSON) -> JSON:
    return {"id": call_id, "type": "function", "function": function}


def result_message(call_id: str, text: str) -> JSON:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def with_results(rng: random.Random, ids: Sequence[str]) -> Talk:
    """A conversation in which each id has a call and its result, and the user asks for something else."""
    kinds = rng.sample(KINDS, 2)
    messages: list[JSON] = []
    for call_id in ids:
        kind = rng.choice(kinds)
        text, values = request_of(kind, rng)
        messages += [
            {"role": "user", "content": text},
            call_message(call_id, kind.name, values),
            result_message(call_id, json.dumps({"is_done": True, "number": rng.randrange(100)})),
            {"role": "assistant", "content": "It is done."},
        ]
    text, values = request_of(kinds[0], rng)
    messages.append({"role": "user", "content": text})
    return Talk(messages, [tool_of(kind) for kind in kinds], (kinds[0].name, values))
