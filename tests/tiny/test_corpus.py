import hashlib
import json
import re
from itertools import islice

import pytest

from diptych.shared.tools.corpus import sums
from diptych.shared.tools.corpus.corpus import HELD_OUT_KINDS, held_out_questions, training_chats
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import Message, Question, is_held_out
from diptych.shared.tools.corpus.relations import RELATIONS
from diptych.shared.tools.corpus.stories import Story, ask_fact, ask_unsaid, draw_story

NUM_CHATS = 3000


@pytest.fixture(scope="module")
def chats() -> list[list[Message]]:
    return list(islice(training_chats(0), NUM_CHATS))


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return held_out_questions(400)


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()


def test_training_text_is_the_text_the_published_weights_saw(chats: list[list[Message]]) -> None:
    # A change here is a change of the corpus: the tokenizer and the models have to be trained again.
    assert digest(chats[:1000]) == "0ab464abeede00c67129e2768cf435a281432408f07c159f934170121917f220"


def test_held_out_questions_are_those_of_the_published_scores(questions: list[Question]) -> None:
    assert digest(questions) == "5d21c30147b0bcb806f9dbb7da2094ce2e702281e2b9db8ae13721436a743ead"


def test_a_stream_depends_on_its_seed_alone(chats: list[list[Message]]) -> None:
    assert list(islice(training_chats(0), 20)) == chats[:20]
    assert list(islice(training_chats(1), 20)) != chats[:20]


def test_a_shorter_list_of_questions_is_the_start_of_a_longer_one(questions: list[Question]) -> None:
    assert held_out_questions(30) == questions[:30]


def test_chats_alternate_user_and_assistant(chats: list[list[Message]]) -> None:
    for chat in chats:
        roles = [message["role"] for message in chat if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert [message["role"] for message in chat].index("user") <= 1
        assert all(message["content"].strip() for message in chat)


def test_every_kind_is_asked_equally_often(questions: list[Question]) -> None:
    kinds = [question.kind for question in questions]
    assert {kind: kinds.count(kind) for kind in HELD_OUT_KINDS} == dict.fromkeys(HELD_OUT_KINDS, 20)
    assert all(question.messages[-1]["role"] == "user" and question.answer for question in questions)


# One statement or answer of each of these shapes names a combination in full.
FACT_PATTERNS = {
    "went": r"(\w+) (?:went|walked) to the (\w+)\.",
    "likes": r"(\w+) likes (\w+)\.",
    "lives": r"(\w+) lives in (\w+)\.",
    "age": r"(\w+) is (\d+) years old\.",
}


def stated_facts(text: str) -> set[tuple[str, str, str]]:
    return {(name, *found) for name, pattern in FACT_PATTERNS.items() for found in re.findall(pattern, text)}


def stated_sums(text: str) -> set[tuple[str, int, int]]:
    pairs = [(int(a), sign, int(b)) for a, sign, b in re.findall(r"(\d+) ([+-]) (\d+) = \d", text)]
    return {("sum", min(a, b), max(a, b)) if sign == "+" else ("difference", a, b) for a, sign, b in pairs}


def test_training_never_states_a_held_out_combination(chats: list[list[Message]]) -> None:
    text = "\n".join(message["content"] for chat in chats for message in chat)
    facts, pairs = stated_facts(text), stated_sums(text)
    assert len(facts) > 3000
    assert len(pairs) > 3000
    assert not [fact for fact in facts if is_held_out(*fact)]
    assert not [pair for pair in pairs if is_held_out(*pair)]


def test_held_out_questions_are_about_held_out_combinations(questions: list[Question]) -> None:
    for question in questions:
        if question.kind in ("sum", "word_problem"):
            assert all(is_held_out(*pair) for pair in stated_sums(question.answer))
        elif question.kind in ("lookup", "yes_no", "retell", "repeat", "long_story"):
            assert all(is_held_out(*fact) for fact in stated_facts(question.answer))


def test_no_held_out_question_is_a_training_prompt(
    chats: list[list[Message]], questions: list[Question]
) -> None:
    seen = {str(chat[:end]) for chat in chats for end in range(1, len(chat), 2)}
    assert not [question for question in questions if str(question.messages) in seen]


def test_split_holds_out_about_a_tenth() -> None:
    held_out = sum(is_held_out("sum", a, b) for a in range(100) for b in range(a, 100))
    assert 0.08 < held_out / 5050 < 0.12


def test_sums_are_right(chats: list[list[Message]]) -> None:
    text = "\n".join(message["content"] for chat in chats for message in chat)
    for a, sign, b, result in re.findall(r"\b(\d+) ([+-]) (\d+) = (\d+)", text):
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_a_lookup_has_one_answer() -> None:
    dice = Dice("one answer")
    for _ in range(300):
        story = draw_story(dice, 12, held_out=False)
        for relation in RELATIONS:
            facts = [fact for fact in story.facts if fact.relation is relation]
            assert len({fact.subject for fact in facts}) == len(facts)
            assert len({fact.slots[relation.identity] for fact in facts}) == len(facts)
        assert ask_fact(dice, story).answer


def test_unsaid_questions_ask_for_nothing_told() -> None:
    dice = Dice("unsaid")
    for _ in range(300):
        story: Story = draw_story(dice, 8, held_out=False)
        asked = ask_unsaid(dice, story).prompt
        told = [fact.fill(fact.relation.asks[0].questions[0]) for fact in story.facts]
        assert asked not in told


def test_dice_match_their_ranges() -> None:
    dice = Dice("ranges")
    assert {dice.between(2, 5) for _ in range(200)} == {2, 3, 4, 5}
    assert {dice.pick("abc") for _ in range(100)} == set("abc")
    assert {dice.pick_weighted("ab", (1.0, 0.0)) for _ in range(100)} == {"a"}
    assert sorted(dice.shuffled(range(50))) == list(range(50))


def test_differences_are_never_negative() -> None:
    dice = Dice("differences")
    assert all(a >= b for a, b in (sums.draw_difference(dice, False) for _ in range(500)))
