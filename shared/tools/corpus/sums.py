"""Small sums, word problems and comparisons over 0..99. The pair of numbers decides the split."""

from diptych.shared.tools.corpus import words
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import Exchange, is_held_out

MAX_NUMBER = 99

_ADD = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a}+{b}",
    "{a} + {b} =",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "What's {a}+{b}?",
    "Calculate {a} + {b}.",
    "How much is {a} + {b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a}-{b}",
    "{a} - {b} =",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "What's {a}-{b}?",
    "Calculate {a} - {b}.",
    "How much is {a} - {b}?",
)
_MORE = (
    "{name} has {a} {goods} and buys {b} more. How many {goods} does {name} have now?",
    "There are {a} {goods} in the basket. {name} adds {b} {goods}. How many {goods} are there now?",
    "{name} picked {a} {goods} on {day} and {b} on the next day. How many {goods} is that?",
)
_LESS = (
    "{name} has {a} {goods} and gives away {b}. How many {goods} are left?",
    "There are {a} {goods} in the basket. {name} takes {b} of them. How many {goods} are left?",
    "{name} had {a} {goods} and sold {b} on {day}. How many {goods} are left?",
)


def draw_sum(dice: Dice, held_out: bool) -> tuple[int, int]:
    """Two numbers; a + b and b + a are on the same side of the split."""
    while True:
        a, b = dice.between(0, MAX_NUMBER), dice.between(0, MAX_NUMBER)
        if is_held_out("sum", min(a, b), max(a, b)) == held_out:
            return a, b


def draw_difference(dice: Dice, held_out: bool) -> tuple[int, int]:
    """Two numbers, the larger first."""
    while True:
        a, b = dice.between(0, MAX_NUMBER), dice.between(0, MAX_NUMBER)
        if a >= b and is_held_out("difference", a, b) == held_out:
            return a, b


def plain_sum(dice: Dice, held_out: bool) -> list[Exchange]:
    if dice.chance(0.5):
        a, b = draw_sum(dice, held_out)
        return [
            Exchange("sum", words.roughen(dice, dice.pick(_ADD).format(a=a, b=b)), f"{a} + {b} = {a + b}")
        ]
    a, b = draw_difference(dice, held_out)
    return [
        Exchange("sum", words.roughen(dice, dice.pick(_SUBTRACT).format(a=a, b=b)), f"{a} - {b} = {a - b}")
    ]


def word_problem(dice: Dice, held_out: bool) -> list[Exchange]:
    slots = {
        "name": words.pick_name(dice),
        "goods": words.pick_word(dice, words.GOODS),
        "day": dice.pick(words.DAYS),
    }
    if dice.chance(0.5):
        a, b = draw_sum(dice, held_out)
        templates, working, result = _MORE, f"{a} + {b}", a + b
    else:
        a, b = draw_difference(dice, held_out)
        templates, working, result = _LESS, f"{a} - {b}", a - b
    answer = f"{working} = {result}, so there are {result} {slots['goods']}."
    return [Exchange("word_problem", dice.pick(templates).format(a=a, b=b, **slots), answer)]


def comparison(dice: Dice, held_out: bool) -> list[Exchange]:
    while True:
        a, b = dice.between(0, MAX_NUMBER), dice.between(0, MAX_NUMBER)
        if a != b and is_held_out("pair", min(a, b), max(a, b)) == held_out:
            break
    if dice.chance(0.5):
        question, word, first = "Which is larger, {a} or {b}?", "larger", max(a, b)
    else:
        question, word, first = "Which is smaller, {a} or {b}?", "smaller", min(a, b)
    answer = f"{first} is {word} than {a + b - first}."
    return [Exchange("comparison", words.roughen(dice, question.format(a=a, b=b)), answer)]


def too_large(dice: Dice, held_out: bool) -> list[Exchange]:
    """Numbers beyond the range: say so instead of guessing. Trained on, never scored."""
    a, b = dice.between(100, 9999), dice.between(0, 9999)
    a, b = (a, b) if dice.chance(0.7) else (b, a)
    prompt = dice.pick(_ADD if dice.chance(0.5) else _SUBTRACT).format(a=a, b=b)
    return [
        Exchange(
            "too_large",
            words.roughen(dice, prompt),
            "That is too large for me. I add and subtract numbers up to 99.",
        )
    ]
