"""The word lists that the corpus draws from, and invented words, so that copying is learned, not a list."""

from collections.abc import Sequence
from string import ascii_lowercase

from diptych.shared.tools.corpus.dice import Dice


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    "Mia Tom Ana Leo Zoe Sam Eva Max Ida Ben Noor Omar Lina Hugo Ruth Ivan Maya Erik Nina Paul Rosa Juan "
    "Sara Otto Wei Aiko Ravi Tara Kofi Amara Yusuf Leila Chen Mei Luca Clara Felix Emma Oscar Alice David "
    "Laura Simon Julia Peter Marta Jonas Helen Victor Irene Adam Grace Daniel Sofia Karim Fatima Bruno "
    "Elena Diego Anna"
)
COLOURS = _split("red blue green yellow black white brown grey orange purple pink silver golden")
THINGS = _split(
    "kite lamp boat drum hat coat scarf bike clock mirror chair table basket bottle blanket umbrella "
    "guitar violin camera radio suitcase backpack helmet notebook pencil candle vase bucket ladder hammer "
    "tent balloon puzzle telescope flute carpet mug teapot ring bell"
)
GIFTS = _split(
    "book key map letter coin ticket photo postcard magazine compass torch whistle necklace bracelet "
    "watch painting medal trophy parcel recipe rope shell stone feather"
)
PLACES = _split(
    "market harbour library museum station park school bakery castle forest beach bridge theatre hospital "
    "airport farm garden river mill tower zoo lake island bank church square stadium valley cinema "
    "village"
)
ROOMS = _split(
    "kitchen attic cellar hall bedroom bathroom garage office workshop balcony nursery pantry lounge study"
)
CITIES = _split(
    "Oslo Paris Rome Cairo Lima Tokyo Delhi Madrid Berlin Vienna Dublin Athens Lisbon Prague Warsaw "
    "Helsinki Nairobi Havana Toronto Sydney Seoul Quito Accra Dakar Boston Geneva Milan Porto Riga Bern"
)
FOODS = _split(
    "soup rice bread cheese pasta salad pizza cake curry honey noodles porridge pancakes dumplings "
    "lentils mushrooms chocolate yoghurt stew omelettes toast beans potatoes waffles"
)
GOODS = _split(
    "apples pears plums lemons carrots onions eggs cherries peaches melons buttons stamps marbles pencils "
    "tiles nails candles bottles roses tulips cards shells ribbons cookies"
)
JOBS = _split(
    "baker teacher doctor farmer pilot painter singer writer carpenter gardener tailor nurse sailor "
    "plumber dentist judge chef miner potter guard barber driver engineer fisher"
)
ANIMALS = _split(
    "cat dog horse rabbit parrot hamster goat turtle pony duck hen sheep mouse donkey lizard owl"
)
PET_NAMES = _split(
    "Pip Biscuit Shadow Pepper Rusty Misty Bubbles Socks Ginger Patch Smoky Daisy Buster Cookie Fluffy "
    "Tiger Snowy Cocoa Pebble Ziggy Muffin Sparky Clover Domino"
)
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
# Past form and base form, for "On Monday Mia painted the fence." and "When did Mia paint the fence?"
ACTIVITIES = (
    ("painted the fence", "paint the fence"),
    ("fixed the roof", "fix the roof"),
    ("washed the windows", "wash the windows"),
    ("baked a pie", "bake a pie"),
    ("planted a tree", "plant a tree"),
    ("cleaned the stove", "clean the stove"),
    ("wrote a poem", "write a poem"),
    ("climbed a hill", "climb a hill"),
    ("built a shelf", "build a shelf"),
    ("read a novel", "read a novel"),
    ("sold the car", "sell the car"),
    ("caught a fish", "catch a fish"),
    ("mowed the lawn", "mow the lawn"),
    ("lost a glove", "lose a glove"),
    ("found a wallet", "find a wallet"),
    ("drew a portrait", "draw a portrait"),
)
FILLERS = (
    "It was a sunny morning.",
    "The birds were singing.",
    "Nobody was in a hurry.",
    "It rained a little in the afternoon.",
    "The wind was cold.",
    "Later the lights went on.",
    "Everybody was in a good mood.",
    "The streets were quiet.",
    "A dog barked somewhere.",
    "Then it was time for tea.",
    "The sky was clear.",
    "Snow lay on the roofs.",
)

_ONSETS = _split("b d f g h j k l m n p r s t v w z br dr gr kr pl st tr sh th")
# No i and u, and the list below: syllables put together at random are rude surprisingly often.
_VOWELS = _split("a e o a e o ai ea ou oa ee")
_CODAS = ["", "", "", "n", "l", "r", "s", "m", "nd", "lt"]
_NOT_IN_WORDS = ("rape", "homo", "porn", "kok", "nazee", "whore", "anal")


def invented_word(dice: Dice) -> str:
    """Two or three syllables that mean nothing, or just any letters; several tokens long."""
    while True:
        if dice.chance(0.25):
            word = "".join(dice.pick(ascii_lowercase) for _ in range(dice.between(2, 7)))
        else:
            num_syllables = 2 + dice.chance(0.3)
            word = "".join(
                dice.pick(_ONSETS) + dice.pick(_VOWELS) + dice.pick(_CODAS) for _ in range(num_syllables)
            )
        if not any(part in word for part in _NOT_IN_WORDS):
            return word


def pick_name(dice: Dice) -> str:
    return invented_word(dice).capitalize() if dice.chance(0.3) else dice.pick(NAMES)


def pick_names(dice: Dice, count: int) -> list[str]:
    """Distinct names."""
    names: list[str] = []
    while len(names) < count:
        name = pick_name(dice)
        if name not in names:
            names.append(name)
    return names


def pick_word(dice: Dice, listed: Sequence[str]) -> str:
    """One of the listed words, or sometimes an invented one (plural or with a capital, as the list is)."""
    word = dice.pick(listed)
    if not dice.chance(0.1):
        return word
    invented = invented_word(dice)
    if word[0].isupper():
        return invented.capitalize()
    return invented + "s" if listed is GOODS else invented


def with_article(noun_phrase: str) -> str:
    return ("an " if noun_phrase[0] in "aeiou" else "a ") + noun_phrase


def roughen(dice: Dice, prompt: str) -> str:
    """Sometimes drop the capital or the final mark, the way people type."""
    if dice.chance(0.1):
        prompt = prompt[0].lower() + prompt[1:]
    if dice.chance(0.1) and prompt[-1] in "?.!":
        prompt = prompt[:-1]
    return prompt
