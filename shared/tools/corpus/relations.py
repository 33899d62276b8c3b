"""The kinds of fact a story can state: how each is said, asked about, listed and written as JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diptych.shared.tools.corpus import words
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import is_held_out

Slots = dict[str, str]


class Ask(NamedTuple):
    """Ways to put one question, and the answer. Templates are filled from the fact's slots."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Relation:
    """One kind of fact about a subject `{a}`.

    `draw` fills the other slots. Slot `identity` is distinct among a story's facts of one relation, and a
    subject has at most one fact of a relation; so every question has exactly one answer. `statements[0]` is
    the canonical form.
    """

    name: str
    identity: str
    draw: Callable[[Dice], Slots]
    statements: tuple[str, ...]
    asks: tuple[Ask, ...]
    yes_no: str
    list_request: str
    list_value: str
    json_field: str


@dataclass(frozen=True)
class Fact:
    relation: Relation
    slots: Slots

    def fill(self, template: str) -> str:
        return template.format(**self.slots)

    @property
    def subject(self) -> str:
        return self.slots["a"]

    @property
    def canonical(self) -> str:
        return self.fill(self.relation.statements[0])

    def is_held_out(self) -> bool:
        return is_held_out(self.relation.name, *self.slots.values())


def _draw_owns(dice: Dice) -> Slots:
    thing, colour = words.pick_word(dice, words.THINGS), dice.pick(words.COLOURS)
    return {"thing": thing, "colour": colour, "a_thing": words.with_article(f"{colour} {thing}")}


def _draw_job(dice: Dice) -> Slots:
    job = words.pick_word(dice, words.JOBS)
    return {"job": job, "a_job": words.with_article(job)}


def _draw_moved(dice: Dice) -> Slots:
    first, last = dice.shuffled(words.ROOMS)[:2]
    return {"first": first, "last": last}


def _draw_did(dice: Dice) -> Slots:
    past, base = dice.pick(words.ACTIVITIES)
    return {"past": past, "base": base, "day": dice.pick(words.DAYS)}


def _draw_pet(dice: Dice) -> Slots:
    return {"animal": dice.pick(words.ANIMALS), "pet": words.pick_word(dice, words.PET_NAMES)}


RELATIONS = (
    Relation(
        name="owns",
        identity="thing",
        draw=_draw_owns,
        statements=("{a} has {a_thing}.", "{a} owns {a_thing}.", "The {colour} {thing} belongs to {a}."),
        asks=(
            Ask(("What does {a} have?", "What does {a} own?", "What belongs to {a}?"), "{a} has {a_thing}."),
            Ask(
                ("Who has the {colour} {thing}?", "Who owns the {thing}?", "Who does the {thing} belong to?"),
                "{a} has the {thing}.",
            ),
            Ask(
                ("What colour is {a}'s {thing}?", "Which colour is the {thing}?"), "The {thing} is {colour}."
            ),
        ),
        yes_no="Does {a} have {a_thing}?",
        list_request="List what everyone has.",
        list_value="{colour} {thing}",
        json_field="has",
    ),
    Relation(
        name="went",
        identity="place",
        draw=lambda dice: {"place": words.pick_word(dice, words.PLACES)},
        statements=(
            "{a} went to the {place}.",
            "{a} walked to the {place}.",
            "{a} took a bus to the {place}.",
        ),
        asks=(
            Ask(("Where did {a} go?", "What place did {a} go to?"), "{a} went to the {place}."),
            Ask(("Who went to the {place}?", "Who is at the {place}?"), "{a} went to the {place}."),
        ),
        yes_no="Did {a} go to the {place}?",
        list_request="List where everyone went.",
        list_value="{place}",
        json_field="went_to",
    ),
    Relation(
        name="bought",
        identity="goods",
        draw=lambda dice: {"count": str(dice.between(2, 40)), "goods": words.pick_word(dice, words.GOODS)},
        statements=(
            "{a} bought {count} {goods}.",
            "{a} came back with {count} {goods}.",
            "{a} paid for {count} {goods}.",
        ),
        asks=(
            Ask(("How many {goods} did {a} buy?", "What did {a} buy?"), "{a} bought {count} {goods}."),
            Ask(("Who bought {goods}?", "Who bought the {goods}?"), "{a} bought {count} {goods}."),
            Ask(("How many {goods} are there?",), "There are {count} {goods}."),
        ),
        yes_no="Did {a} buy {count} {goods}?",
        list_request="List what everyone bought.",
        list_value="{count} {goods}",
        json_field="bought",
    ),
    Relation(
        name="likes",
        identity="food",
        draw=lambda dice: {"food": words.pick_word(dice, words.FOODS)},
        statements=("{a} likes {food}.", "{a} loves to eat {food}.", "The favourite food of {a} is {food}."),
        asks=(
            Ask(("What does {a} like?", "What does {a} like to eat?"), "{a} likes {food}."),
            Ask(("Who likes {food}?", "Who likes to eat {food}?"), "{a} likes {food}."),
        ),
        yes_no="Does {a} like {food}?",
        list_request="List what everyone likes to eat.",
        list_value="{food}",
        json_field="likes",
    ),
    Relation(
        name="job",
        identity="job",
        draw=_draw_job,
        statements=("{a} is {a_job}.", "{a} works as {a_job}.", "{a} earns money as {a_job}."),
        asks=(
            Ask(("What is {a}'s job?", "What does {a} work as?"), "{a} is {a_job}."),
            Ask(("Who is the {job}?", "Who works as {a_job}?"), "{a} is {a_job}."),
        ),
        yes_no="Is {a} {a_job}?",
        list_request="List everyone's job.",
        list_value="{job}",
        json_field="job",
    ),
    Relation(
        name="pet",
        identity="pet",
        draw=_draw_pet,
        statements=(
            "{a}'s {animal} is called {pet}.",
            "{a} feeds a {animal} called {pet}.",
            "{pet} is the {animal} of {a}.",
        ),
        asks=(
            Ask(
                ("What is {a}'s {animal} called?", "What is the name of {a}'s pet?"),
                "{a}'s {animal} is called {pet}.",
            ),
            Ask(("Who is {pet}?", "Whose pet is {pet}?"), "{pet} is {a}'s {animal}."),
        ),
        yes_no="Is {a}'s {animal} called {pet}?",
        list_request="List everyone's pet.",
        list_value="{animal} {pet}",
        json_field="pet",
    ),
    Relation(
        name="gave",
        identity="gift",
        draw=lambda dice: {"gift": dice.pick(words.GIFTS), "b": words.pick_name(dice)},
        statements=(
            "{a} gave the {gift} to {b}.",
            "{b} got the {gift} from {a}.",
            "{a} handed the {gift} to {b}.",
        ),
        asks=(
            Ask(("What did {a} give to {b}?", "What did {b} get from {a}?"), "{a} gave the {gift} to {b}."),
            Ask(
                ("Who gave the {gift} to {b}?", "Who did {a} give the {gift} to?"),
                "{a} gave the {gift} to {b}.",
            ),
            Ask(("Who has the {gift} now?", "Who got the {gift}?"), "{b} has the {gift} now."),
        ),
        yes_no="Did {a} give the {gift} to {b}?",
        list_request="List what everyone gave away.",
        list_value="{gift}",
        json_field="gave",
    ),
    Relation(
        name="lives",
        identity="city",
        draw=lambda dice: {"city": words.pick_word(dice, words.CITIES)},
        statements=("{a} lives in {city}.", "{a} has a home in {city}.", "The house of {a} is in {city}."),
        asks=(
            Ask(("Where does {a} live?", "In which city does {a} live?"), "{a} lives in {city}."),
            Ask(("Who lives in {city}?",), "{a} lives in {city}."),
        ),
        yes_no="Does {a} live in {city}?",
        list_request="List where everyone lives.",
        list_value="{city}",
        json_field="city",
    ),
    Relation(
        name="age",
        identity="years",
        draw=lambda dice: {"years": str(dice.between(2, 99))},
        statements=(
            "{a} is {years} years old.",
            "{a} has just turned {years}.",
            "The age of {a} is {years}.",
        ),
        asks=(
            Ask(("How old is {a}?", "What is {a}'s age?"), "{a} is {years} years old."),
            Ask(("Who is {years} years old?", "Who is {years}?"), "{a} is {years} years old."),
        ),
        yes_no="Is {a} {years} years old?",
        list_request="List how old everyone is.",
        list_value="{years}",
        json_field="age",
    ),
    Relation(
        name="moved",
        identity="last",
        draw=_draw_moved,
        statements=(
            "{a} went from the {first} to the {last}.",
            "{a} was in the {first} and then moved to the {last}.",
            "{a} left the {first} for the {last}.",
        ),
        asks=(
            Ask(("Where is {a} now?", "Which room is {a} in now?"), "{a} is in the {last} now."),
            Ask(("Where was {a} before?", "Which room did {a} leave?"), "{a} was in the {first} before."),
            Ask(("Who is in the {last} now?", "Who moved to the {last}?"), "{a} is in the {last} now."),
        ),
        yes_no="Is {a} in the {last} now?",
        list_request="List which room everyone is in now.",
        list_value="{last}",
        json_field="room",
    ),
    Relation(
        name="did",
        identity="past",
        draw=_draw_did,
        statements=("{a} {past} on {day}.", "On {day}, {a} {past}.", "{day} came and {a} {past}."),
        asks=(
            Ask(("When did {a} {base}?", "On which day did {a} {base}?"), "{a} {past} on {day}."),
            Ask(("What did {a} do on {day}?",), "{a} {past} on {day}."),
            Ask(("Who {past}?", "Who {past} on {day}?"), "{a} {past} on {day}."),
        ),
        yes_no="Did {a} {base} on {day}?",
        list_request="List what everyone did.",
        list_value="{past}",
        json_field="did",
    ),
)
