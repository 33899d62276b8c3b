"""JSON records: write one, read a field, list the keys, change a field, find one in an array."""

import json

from diptych.shared.tools.corpus import words
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import Exchange, is_held_out

Value = str | int | bool
Record = dict[str, Value]

_FIELDS = ("age", "city", "job", "colour", "pet", "food", "count", "room", "day", "code", "active", "score")


def _draw_value(dice: Dice, field: str) -> Value:
    if field in ("age", "count", "score"):
        return dice.between(0, 99)
    if field == "active":
        return dice.chance(0.5)
    if field == "code":
        return f"{dice.pick('ABCDEFGHKLMNPRSTUVWXYZ')}{dice.between(0, 9)}-{dice.between(10, 999)}"
    source = {
        "city": words.CITIES,
        "job": words.JOBS,
        "colour": words.COLOURS,
        "pet": words.ANIMALS,
        "food": words.FOODS,
        "room": words.ROOMS,
        "day": words.DAYS,
    }[field]
    return words.pick_word(dice, source)


def draw_value(dice: Dice, name: str, field: str, held_out: bool) -> Value | None:
    """A value whose combination with name and field is on the wanted side; None if the field offers none."""
    for _ in range(60):
        value = _draw_value(dice, field)
        if is_held_out("field", name, field, str(value)) == held_out:
            return value
    return None


def draw_record(dice: Dice, fields: list[str], held_out: bool, name: str | None = None) -> Record:
    name = name or words.pick_name(dice)
    record: Record = {"name": name}
    for field in fields:
        value = draw_value(dice, name, field, held_out)
        if value is not None:
            record[field] = value
    while len(record) == 1:  # no field had a value of the wanted side; ages are many, so one of them is
        age = draw_value(dice, name, "age", held_out)
        if age is not None:
            record["age"] = age
    return record


def _draw_fields(dice: Dice, low: int = 2, high: int = 6) -> list[str]:
    return dice.shuffled(_FIELDS)[: dice.between(low, high)]


def _spoken(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def write_record(dice: Dice, held_out: bool) -> list[Exchange]:
    record = draw_record(dice, _draw_fields(dice, high=8), held_out)
    stated = dice.pick((", ", "; ", "\n")).join(
        dice.pick(("{} is {}", "{}: {}", "{} = {}")).format(key, _spoken(value))
        for key, value in record.items()
    )
    request = dice.pick(
        ("Write a JSON record: {}", "Write this as JSON: {}", "Make a JSON record with {}")
    ).format(stated)
    return [Exchange("record_write", request, json.dumps(record))]


def read_record(dice: Dice, held_out: bool) -> list[Exchange]:
    """Questions about one record: a field's value, the keys, or the record with one field changed."""
    record = draw_record(dice, _draw_fields(dice), held_out)
    opening = dice.pick(
        ("{record}\n{ask}", "Here is a JSON record: {record}\n{ask}", "Record: {record} {ask}")
    )
    exchanges = []
    for turn in range(dice.pick((1, 1, 2, 3))):
        exchange = _ask_record(dice, record, held_out)
        if turn == 0:
            exchange = exchange._replace(
                prompt=opening.format(record=json.dumps(record), ask=exchange.prompt)
            )
        exchanges.append(exchange)
        if exchange.kind == "record_change":
            break  # later questions would have two records to choose from
    return exchanges


def _ask_record(dice: Dice, record: Record, held_out: bool) -> Exchange:
    field = dice.pick(list(record))
    point = dice.below(10)
    if point < 5:
        question = dice.pick(("What is the {}?", "What is the value of {}?", 'Read the field "{}".')).format(
            field
        )
        return Exchange(
            "record_read", words.roughen(dice, question), f"The {field} is {_spoken(record[field])}."
        )
    if point < 7:
        question = dice.pick(("List the keys.", "Which keys does the record have?", "What are the keys?"))
        return Exchange("record_keys", words.roughen(dice, question), ", ".join(record))
    field = dice.pick(list(record)[1:] or ["name"])
    value = draw_value(dice, str(record["name"]), field, held_out)
    value = record[field] if value is None else value
    question = dice.pick(("Change {} to {}.", "Set {} to {}.")).format(field, _spoken(value))
    return Exchange("record_change", question, json.dumps(record | {field: value}))


def find_record(dice: Dice, held_out: bool) -> list[Exchange]:
    """Look a field up in an array of records with the same keys."""
    fields = _draw_fields(dice, low=1, high=3)
    names = words.pick_names(dice, dice.between(2, 5))
    records = [draw_record(dice, fields, held_out, name) for name in names]
    exchanges = []
    for turn in range(dice.pick((1, 2, 3))):
        record = dice.pick(records)
        field = dice.pick(list(record)[1:] or ["name"])
        question = dice.pick(("What is the {} of {}?", "Find the {} of {}.")).format(field, record["name"])
        answer = f"The {field} of {record['name']} is {_spoken(record[field])}."
        prompt = f"{json.dumps(records)}\n{question}" if turn == 0 else question
        exchanges.append(Exchange("record_find", prompt, answer))
    return exchanges
