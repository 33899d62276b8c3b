"""The corpus: endless training chats from a seed, and the held-out questions that training never emits."""

from collections.abc import Iterator

from diptych.shared.tools.corpus import echoes, records, small_talk, stories, sums
from diptych.shared.tools.corpus.dice import Dice
from diptych.shared.tools.corpus.exchange import Exchange, Message, Question, Task, to_messages

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Diptych's built-in model.",
    "Answer the user's questions.",
    "Be brief and correct.",
    "You are a careful assistant that answers in one sentence.",
)

# How often each task opens or joins a chat.
TASK_WEIGHTS: dict[Task, float] = {
    stories.short_story: 8.0,
    sums.plain_sum: 5.0,
    sums.word_problem: 3.0,
    sums.comparison: 1.0,
    sums.too_large: 0.4,
    records.write_record: 2.0,
    records.read_record: 2.5,
    records.find_record: 2.0,
    echoes.repeat: 1.0,
    echoes.repeat_word: 0.7,
    echoes.count: 1.5,
    echoes.reverse: 1.2,
    small_talk.talk: 2.0,
    small_talk.meet: 0.5,
    small_talk.unknown: 0.7,
    stories.tell_story: 0.5,
}
_TASKS = tuple(TASK_WEIGHTS)
_WEIGHTS = tuple(TASK_WEIGHTS.values())
# Tasks with a split: the exact answer follows from the prompt, so a held-out question can be scored.
_UNSCORED = (sums.too_large, small_talk.talk, small_talk.meet, small_talk.unknown, stories.tell_story)
_SCORED_TASKS = tuple(task for task in _TASKS if task not in _UNSCORED)
# About 900 tokens, rarely more than a training row: a chat stops growing here.
MAX_CHAT_CHARS = 2900
# The kinds of held-out question, each asked equally often.
HELD_OUT_KINDS = (
    "lookup",
    "yes_no",
    "unsaid",
    "list",
    "retell",
    "story_record",
    "long_story",
    "long_chat",
    "sum",
    "word_problem",
    "comparison",
    "record_write",
    "record_read",
    "record_keys",
    "record_change",
    "record_find",
    "repeat",
    "repeat_word",
    "count",
    "reverse",
)


def _num_chars(exchanges: list[Exchange]) -> int:
    return sum(len(exchange.prompt) + len(exchange.answer) + 12 for exchange in exchanges)


def _draw_task(dice: Dice) -> Task:
    return dice.pick_weighted(_TASKS, _WEIGHTS)


def _mixed_chat(dice: Dice, max_chars: int) -> list[Exchange]:
    """Several tasks in one chat, up to about `max_chars` characters."""
    exchanges: list[Exchange] = []
    while True:
        more = _draw_task(dice)(dice, False)
        if exchanges and _num_chars(exchanges) + _num_chars(more) > max_chars:
            return exchanges
        exchanges += more


def _sums_in_a_row(dice: Dice) -> list[Exchange]:
    tasks = (sums.plain_sum, sums.plain_sum, sums.word_problem, sums.comparison)
    return [exchange for _ in range(dice.between(3, 12)) for exchange in dice.pick(tasks)(dice, False)]


def training_chat(dice: Dice) -> list[Message]:
    """One training chat: a single task, a row of sums, a mixed chat, or a long story."""
    point = dice.below(100)
    if point < 45:
        exchanges = _draw_task(dice)(dice, False)
    elif point < 60:
        exchanges = _sums_in_a_row(dice)
    elif point < 85:
        exchanges = _mixed_chat(dice, dice.pick((400, 800, 1600, MAX_CHAT_CHARS)))
    elif point < 97:
        exchanges = stories.long_story(dice, False)
    else:
        exchanges = stories.ask_without_story(dice, False)
    if _num_chars(exchanges) > MAX_CHAT_CHARS:
        return training_chat(dice)
    return to_messages(exchanges, dice.pick(SYSTEM_PROMPTS) if dice.chance(0.15) else None)


def training_chats(seed: int | str) -> Iterator[list[Message]]:
    """An endless stream of training chats; the same seed gives the same bytes on every Python version."""
    dice = Dice("train", seed)
    while True:
        yield training_chat(dice)


def _draw_held_out(dice: Dice, kind: str) -> list[Exchange]:
    """Turns that end with a held-out exchange of the wanted kind."""
    if kind == "long_chat":
        history = _mixed_chat(dice, 2200)
        return [*history, *_draw_held_out(dice, dice.pick(("lookup", "sum", "record_read", "list", "count")))]
    while True:
        if kind == "long_story":
            exchanges = stories.long_story(dice, True, min_facts=30, max_facts=45)
        else:
            exchanges = dice.pick(_SCORED_TASKS)(dice, True)
        if kind in ("long_story", exchanges[-1].kind) and _num_chars(exchanges) <= MAX_CHAT_CHARS:
            return exchanges


def held_out_questions(num_questions: int = 400, seed: int | str = 0) -> list[Question]:
    """Chats that end with a question on a held-out combination, the kinds in turn, no two alike."""
    dice = Dice("held_out", seed)
    questions: list[Question] = []
    seen: set[str] = set()
    while len(questions) < num_questions:
        kind = HELD_OUT_KINDS[len(questions) % len(HELD_OUT_KINDS)]
        exchanges = _draw_held_out(dice, kind)
        messages = to_messages(exchanges)[:-1]
        if str(messages) not in seen:
            seen.add(str(messages))
            questions.append(Question(kind, messages, exchanges[-1].answer))
    return questions
