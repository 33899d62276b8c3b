"""What speculation brings end to end: counted by hand, and on engines with and without it."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench.drive import check_fits
from diptych.shared.tools.bench.prompt_texts import encode, held_out, read_prompts
from diptych.shared.tools.bench.speculation_gain import Comparison, Departure, Pass, departures, measure
from diptych.shared.tools.bench.workloads import Request
from diptych.shared.types import SpeculationStats

NO_MODEL = {"speculative": "ngram", "speculative_num_steps": 3, "speculative_topk": 1}


def engine(**flags: object) -> LLM:
    return LLM(**{"device": "cpu", "panel": "reference", "max_total_tokens": 2048, **flags})


def run_of(seconds: float, *output_ids: list[int], stats: tuple[int, int, int] = (0, 0, 0)) -> Pass:
    return Pass(seconds, 9, list(output_ids), SpeculationStats(*stats))


def test_speeds_are_medians_and_the_bonus_is_separate() -> None:
    plain = [run_of(seconds, [1, 2], [3] * 4) for seconds in (3.0, 2.0, 60.0)]
    fast = [run_of(seconds, [1, 2], [3] * 4, stats=(3, 9, 3)) for seconds in (1.0, 0.1, 1.5)]
    values = Comparison(2, fast, plain, [Departure(0, 1, 0.5)]).as_json()
    assert values["plain_tokens_per_s"] == pytest.approx(2.0)
    assert values["speculative_tokens_per_s"] == pytest.approx(6.0)
    assert values["speedup"] == pytest.approx(3.0)
    assert (values["tokens_per_verification"], values["accepted_per_verification"]) == (2.0, 1.0)
    assert values["acceptance_rate"] == pytest.approx(1 / 3)
    assert values["departures"] == [{"request": 0, "position": 1, "distance": 0.5}]
    assert not Comparison(2, fast, []).is_complete


def test_an_engine_answers_all_prompts_so_many_at_once() -> None:
    """A clock that ticks once a look: a run takes one tick, and steps say how many ran at once."""
    llm, ticks = engine(), count()
    prompts = encode(llm, held_out(3))
    steps, ids = {}, {}
    for batch_size in (1, 2):
        runs: list[Pass] = []
        seen: list[int] = []
        measure(
            llm, prompts, batch_size, runs, max_new_tokens=6, num_repeats=2, num_warm_ups=1,
            on_run=lambda what, num_tokens, seen=seen: seen.append, clock=lambda: float(next(ticks)),
        )  # fmt: skip
        assert [run.total_time for run in runs] == [1.0, 1.0]
        assert runs[0].output_ids == runs[1].output_ids
        assert runs[0].speculation == SpeculationStats()
        assert max(seen) == runs[0].num_tokens
        steps[batch_size], ids[batch_size] = runs[0].num_steps, runs[0].output_ids
    assert ids[1] == ids[2]
    assert steps[1] == sum(map(len, ids[1])) > steps[2]  # alone: a prompt gives one token, so does a step


def test_an_engine_that_speculates_gives_the_same_and_counts() -> None:
    plain, fast = engine(), engine(**NO_MODEL)
    prompts = encode(plain, ["Repeat this sentence: Mara has the red kite. Bo has the blue drum.", "Hi."])
    runs: dict[LLM, list[Pass]] = {plain: [], fast: []}
    for llm, found in runs.items():
        measure(llm, prompts, 2, found, max_new_tokens=24, num_repeats=1, num_warm_ups=0)
    (without,), (with_drafts,) = runs.values()
    assert without.output_ids == with_drafts.output_ids
    stats = with_drafts.speculation
    assert stats == fast.stats().speculation
    assert stats.num_accepted_tokens > 0
    assert departures(plain, prompts, without, with_drafts) == []


def test_where_answers_part_the_two_tokens_are_looked_up() -> None:
    llm = engine()
    prompts = encode(llm, ["What is 12 + 30?"] * 3)
    runs: list[Pass] = []
    measure(llm, prompts, 3, runs, max_new_tokens=4, num_repeats=1, num_warm_ups=0)
    right = runs[0].output_ids[0]
    other = runs[0]._replace(output_ids=[right, [right[0], right[1] + 1, *right[2:]], right[:2]])
    found = departures(llm, prompts, runs[0], other)
    assert [(departure.request, departure.position) for departure in found] == [(1, 1), (2, 2)]
    distance = found[0].distance
    assert distance is None or distance > 0
    assert found[1].distance is None  # an end that is no token


def test_prompts_are_texts_or_chats(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]'
    file.write_text(f'Hello\n\n  {chat}\n"two\\nlines"\n[1] is a footnote\n', encoding="utf-8")
    asked = read_prompts(file)
    assert asked[0] == "Hello"
    assert [message["role"] for message in asked[1]] == ["system", "user"]  # type: ignore[index]
    assert asked[2:] == ["two\nlines", "[1] is a footnote"]
    llm = engine()
    assert llm.tokenizer is not None
    hello = llm.tokenizer.chat([{"role": "user", "content": "Hello"}])
    assert encode(llm, asked)[:2] == [hello, llm.tokenizer.chat(asked[1])]  # type: ignore[arg-type]
    assert encode(llm, ["Hello"], is_raw=True) == [llm.tokenizer.encode("Hello")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has no prompts"),
        ('Hello\n[{"role": "user"\n', r"prompts.jsonl, line 2: .*delimiter"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompts(file)
    with pytest.raises(ValueError, match=r"cannot read prompts from .*missing"):
        read_prompts(tmp_path / "missing")


def test_what_cannot_be_answered_whole_is_refused() -> None:
    llm = engine(max_total_tokens=64)
    with pytest.raises(ValueError, match=r"request 2, of 50 \+ 20 tokens, .* the KV pool \(64\)"):
        check_fits(llm, [Request([1] * 44, 20), Request([1] * 50, 20)])
    with pytest.raises(ValueError, match=r"prompt 2: .*role"):
        encode(llm, ["Hi.", [{"content": "no role"}]])
    llm.tokenizer = None
    with pytest.raises(ValueError, match="tiny-dense has no tokenizer: name one with --tokenizer"):
        encode(llm, ["Hi."])
