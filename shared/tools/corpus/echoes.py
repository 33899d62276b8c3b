"""Tasks with longer outputs that follow from the prompt alone: repeat, count, reverse."""

from diptych.shared.tools.corpus import words
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import Exchange, is_held_out
from diptych.shared.tools.corpus.relations import RELATIONS
from diptych.shared.tools.corpus.stories import draw_fact

_REPEAT = (
    "Repeat this sentence: {}",
    "Repeat after me: {}",
    "Say this again: {}",
    'Repeat: "{}"',
    "Please repeat: {}",
)


def repeat(dice: Dice, held_out: bool) -> list[Exchange]:
    facts = [
        draw_fact(dice, dice.pick(RELATIONS), words.pick_name(dice), held_out)
        for _ in range(dice.pick((1, 1, 2, 3)))
    ]
    text = " ".join(fact.fill(dice.pick(fact.relation.statements)) for fact in facts)
    return [Exchange("repeat", dice.pick(_REPEAT).format(text), text)]


def repeat_word(dice: Dice, held_out: bool) -> list[Exchange]:
    while True:
        word, times = words.pick_word(dice, words.THINGS), dice.between(2, 10)
        if is_held_out("times", word, times) == held_out:
            break
    return [Exchange("repeat_word", f"Say the word {word} {times} times.", " ".join([word] * times))]


def count(dice: Dice, held_out: bool) -> list[Exchange]:
    """Count up or down, by ones or by a step: up to 30 numbers, or now and then up to 100."""
    while True:
        step = dice.pick((1, 1, 1, 2, 5, 10))
        low = 1 if dice.chance(0.15) else dice.between(0, 9) * step if step > 2 else dice.between(0, 80)
        num_steps = (
            dice.between(2, 100) if low == 1 and step == 1 and dice.chance(0.4) else dice.between(2, 30)
        )
        high = low + step * num_steps
        if high <= 100 and is_held_out("count", low, high, step) == held_out:
            break
    numbers = list(range(low, high + 1, step))
    by = "" if step == 1 else f" in steps of {step}"
    if dice.chance(0.3):
        numbers.reverse()
        prompt = f"Count down from {high} to {low}{by}."
    elif low == 1 and dice.chance(0.5):
        prompt = f"Count to {high}{by}."
    else:
        prompt = f"Count from {low} to {high}{by}."
    return [Exchange("count", words.roughen(dice, prompt), ", ".join(str(number) for number in numbers))]


def reverse(dice: Dice, held_out: bool) -> list[Exchange]:
    while True:
        chosen = dice.shuffled(words.THINGS + words.ANIMALS + words.GIFTS)[: dice.between(2, 7)]
        if is_held_out("order", *chosen) == held_out:
            break
    prompt = dice.pick(("Say these words in reverse order: {}.", "Reverse this list: {}."))
    return [
        Exchange(
            "reverse", words.roughen(dice, prompt.format(", ".join(chosen))), ", ".join(reversed(chosen))
        )
    ]
