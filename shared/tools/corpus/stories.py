"""Short stories with facts to look up, and the questions about them."""

import json
from dataclasses import dataclass, replace

from diptych.shared.tools.corpus import words
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import Exchange
from diptych.shared.tools.corpus.relations import RELATIONS, Ask, Fact, Relation

NOT_SAID = "The story does not say."
READY = "I have read the story. What would you like to know?"


@dataclass(frozen=True)
class Story:
    """Facts in the order told, and the text that tells them."""

    facts: list[Fact]
    names: list[str]
    text: str
    held_out: bool


def draw_fact(dice: Dice, relation: Relation, subject: str, held_out: bool) -> Fact:
    """A fact of the wanted side of the split."""
    while True:
        fact = Fact(relation, {"a": subject, **relation.draw(dice)})
        if fact.is_held_out() == held_out and fact.slots.get("b") != subject:
            return fact


def draw_story(dice: Dice, num_facts: int, held_out: bool) -> Story:
    """A story of `num_facts` facts about a few people; two to five facts on each."""
    names = words.pick_names(dice, max(2, num_facts // dice.between(2, 4)))
    # Two to four relations carry a short story, so that the facts of one relation compete for the answer.
    relations = dice.shuffled(RELATIONS)[: max(dice.between(2, 4), 1 + num_facts // len(names))]
    pairs = dice.shuffled([(name, relation) for name in names for relation in relations])[:num_facts]
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    for name, relation in pairs:
        for _ in range(50):
            fact = draw_fact(dice, relation, name, held_out)
            identity = (relation.name, fact.slots[relation.identity])
            if identity not in taken:
                taken.add(identity)
                facts.append(fact)
                break
    sentences = []
    for fact in facts:
        if dice.chance(0.08):
            sentences.append(dice.pick(words.FILLERS))
        sentences.append(fact.fill(dice.pick(fact.relation.statements)))
    return Story(facts, names, " ".join(sentences), held_out)


def ask_fact(dice: Dice, story: Story) -> Exchange:
    """Look one fact up, by any of its slots."""
    fact = dice.pick(story.facts)
    ask: Ask = dice.pick(fact.relation.asks)
    return Exchange("lookup", words.roughen(dice, fact.fill(dice.pick(ask.questions))), fact.fill(ask.answer))


def ask_yes_no(dice: Dice, story: Story) -> Exchange:
    """Confirm a fact, or correct a wrong one."""
    fact = dice.pick(story.facts)
    if dice.chance(0.5):
        return Exchange("yes_no", fact.fill(fact.relation.yes_no), f"Yes, {fact.canonical}")
    wrong = draw_fact(dice, fact.relation, fact.subject, story.held_out)
    question = wrong.fill(fact.relation.yes_no)
    agrees = question == fact.fill(fact.relation.yes_no)
    return Exchange("yes_no", question, f"{'Yes' if agrees else 'No'}, {fact.canonical}")


def ask_unsaid(dice: Dice, story: Story) -> Exchange:
    """Ask for a fact that the story does not give, about a person in it or a stranger."""
    told = {(fact.subject, fact.relation.name) for fact in story.facts}
    while True:
        relation = dice.pick(RELATIONS)
        subject = dice.pick(story.names) if dice.chance(0.5) else words.pick_name(dice)
        if (subject, relation.name) in told or any(subject == fact.slots.get("b") for fact in story.facts):
            continue
        # The first question of a relation's first ask names the subject alone or with a detail of its own.
        asked = draw_fact(dice, relation, subject, story.held_out)
        return Exchange("unsaid", asked.fill(relation.asks[0].questions[0]), NOT_SAID)


def ask_list(dice: Dice, story: Story) -> Exchange:
    """All facts of one relation, as a list in story order."""
    relation = dice.pick(story.facts).relation
    facts = [fact for fact in story.facts if fact.relation is relation]
    lines = [fact.fill("- {a}: " + relation.list_value) for fact in facts]
    return Exchange("list", words.roughen(dice, relation.list_request), "\n".join(lines))


def ask_retell(dice: Dice, story: Story) -> Exchange:
    """Everything, one canonical sentence a line; only for stories short enough to retell."""
    request = dice.pick(
        ("Retell the story as a list of facts.", "Write the facts as a list.", "Sum up the story in a list.")
    )
    return Exchange(
        "retell", words.roughen(dice, request), "\n".join(f"- {fact.canonical}" for fact in story.facts)
    )


def ask_record(dice: Dice, story: Story) -> Exchange:
    """What is known about one person, as JSON with the fields in story order."""
    subject = dice.pick(story.facts).subject
    record: dict[str, str | int] = {"name": subject}
    for fact in story.facts:
        if fact.subject == subject:
            value = fact.fill(fact.relation.list_value)
            record[fact.relation.json_field] = int(value) if value.isdigit() else value
    request = dice.pick(("Write a JSON record about {}.", "Give me a JSON record for {}.")).format(subject)
    return Exchange("story_record", request, json.dumps(record))


ASKS = (ask_fact, ask_yes_no, ask_unsaid, ask_list, ask_retell, ask_record)
_ASK_WEIGHTS = (6.0, 1.5, 1.2, 2.0, 0.7, 0.8)
MAX_RETOLD_FACTS = 10


def ask_any(dice: Dice, story: Story) -> Exchange:
    while True:
        ask = dice.pick_weighted(ASKS, _ASK_WEIGHTS)
        if ask is not ask_retell or len(story.facts) <= MAX_RETOLD_FACTS:
            return ask(dice, story)


_OPENINGS = (
    "{story}\n\n{ask}",
    "{story} {ask}",
    "Story: {story}\nQuestion: {ask}",
    "Read this story: {story}\n{ask}",
)
_READ_FIRST = (
    "Read this story: {story}",
    "I will tell you a story. {story}",
    "Here is a story. {story}",
    "Story: {story}",
)


def tell_and_ask(dice: Dice, story: Story, asks: list[Exchange]) -> list[Exchange]:
    """The story, then the questions: the first of them in the story's turn, or each in a turn of its own."""
    if len(asks) > 1 and dice.chance(0.3):
        return [Exchange("read", dice.pick(_READ_FIRST).format(story=story.text), READY), *asks]
    opening = dice.pick(_OPENINGS).format(story=story.text, ask=asks[0].prompt)
    return [asks[0]._replace(prompt=opening), *asks[1:]]


def short_story(dice: Dice, held_out: bool) -> list[Exchange]:
    story = draw_story(dice, dice.between(2, 12), held_out)
    return tell_and_ask(dice, story, [ask_any(dice, story) for _ in range(dice.pick((1, 2, 3, 4, 6, 8)))])


def long_story(dice: Dice, held_out: bool, min_facts: int = 20, max_facts: int = 60) -> list[Exchange]:
    """Several stories under headings, or one long one, followed by many questions."""
    story = draw_story(dice, dice.between(min_facts, max_facts), held_out)
    if dice.chance(0.5):
        sentences = story.text.split(". ")
        num_parts = dice.between(2, 4)
        size = -(-len(sentences) // num_parts)
        parts = [
            ". ".join(sentences[start : start + size]).rstrip(".") for start in range(0, len(sentences), size)
        ]
        story = replace(story, text="\n".join(f"Story {i + 1}: {part}." for i, part in enumerate(parts)))
    return tell_and_ask(dice, story, [ask_any(dice, story) for _ in range(dice.between(3, 12))])


def tell_story(dice: Dice, held_out: bool) -> list[Exchange]:
    """A request for a story; many answers are right, so it is trained on and never scored."""
    story = draw_story(dice, dice.between(3, 8), held_out)
    request = dice.pick(
        (
            "Tell me a story.",
            "Please tell me a short story.",
            "Make up a story.",
            "Can you tell me a story?",
            "Tell me something.",
        )
    )
    return [Exchange("tell", words.roughen(dice, request), f"Here is a story. {story.text}")]


def ask_without_story(dice: Dice, held_out: bool) -> list[Exchange]:
    """A lookup question at the very start of a chat, before any story."""
    fact = draw_fact(dice, dice.pick(RELATIONS), words.pick_name(dice), held_out)
    ask = dice.pick(fact.relation.asks)
    question = words.roughen(dice, fact.fill(dice.pick(ask.questions)))
    return [Exchange("no_story", question, "I do not know. Please tell me the story first.")]
