"""`diptych diff` between servers: equal ones agree, other weights are found, near ties are no errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.tools.commands.diff_prompts import encode_prompts
from diptych.shared.tools.conformance.diff.server_diff import (
    Compared,
    PanelSide,
    Scored,
    ServerDiff,
    ServerSide,
    compare,
    compare_servers,
    ids_of_texts,
)
from diptych.shared.tools.conformance.diff.server_diff_report import choice_tables, rows, write_server_report
from diptych.shared.tools.conformance.server.answer import Answer, read_answer
from diptych.shared.tools.conformance.server.logprob_tolerance import TABLE
from tests.server_check.local_server import LocalServer

EXACT = TABLE["float32"]
TEXTS = ["What is 12 + 30?"]


def panel(**flags: object) -> PanelSide:
    settings = {"device": "cpu", "max_total_tokens": 1024, "disable_radix_cache": True, **flags}
    return PanelSide("reference", LLM("tiny-dense", **settings))


def test_a_server_agrees_with_its_panel_and_other_weights_do_not(
    correct_server: LocalServer, tmp_path: Path
) -> None:
    a = panel()
    tokenizer = a.llm.tokenizer
    assert tokenizer is not None
    prompts = encode_prompts(tokenizer, TEXTS, raw=False)
    b = ServerSide(correct_server.url, tokenizer, prompts[0])
    found = compare_servers(a, b, prompts, 4, EXACT)
    assert found.is_same, found.sentence()
    assert found.sentence() == f"A and B agree at all {len(found.positions)} positions within the tolerance."
    assert len(found.positions) == len(found.texts[0]) - 1  # the whole text is scored with echo
    assert 0 < found.mean_error < 1e-4

    text, offers = found.texts[0][:6], b.offers
    by_echo = b.score(text)
    b.offers = replace(offers, echo_logprobs=False, prompt_logprobs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b.server, "complete", partial(as_vllm, b.server.complete))
        by_prompt_logprobs = b.score(text)
    assert by_prompt_logprobs.keys() == by_echo.keys()
    for position, scored in by_prompt_logprobs.items():
        assert scored.logprob == by_echo[position].logprob
        assert scored.best == by_echo[position].best

    # Without either every position takes a request of its own.
    b.offers = replace(offers, echo_logprobs=False)
    one_by_one = b.score(text)
    b.offers = offers
    assert sorted(one_by_one) == sorted(by_echo) == list(range(5))
    for position, scored in one_by_one.items():
        assert scored.best == by_echo[position].best
        own = by_echo[position].top.get(text[position + 1])
        assert scored.logprob == (own if own is None else pytest.approx(own, abs=1e-4))

    other = compare_servers(panel(quantization="int4"), b, prompts, 4, EXACT)
    assert not other.is_same
    assert "positions are beyond the tolerance" in other.sentence()
    choices = choice_tables(other, tokenizer)
    page = write_server_report(other, tmp_path / "out", {"A": "<a>"}, choices).read_text()
    assert "positions are beyond the tolerance" in page
    assert "&lt;a&gt;" in page
    assert dict(rows(other))["beyond"] == f"{len(other.beyond)} positions"


def as_vllm(complete: Callable[..., list[Answer]], ids: list[int], **params: Any) -> list[Answer]:
    """A server without echo that has `prompt_logprobs`."""
    assert "echo" not in params
    assert params.pop("prompt_logprobs") == 20
    (answer,) = complete(ids, echo=True, **params)
    listed: list[Any] = [None]
    for i, (own, top) in enumerate(zip(answer.prompt_logprobs or (), answer.prompt_top_logprobs or ())):
        if i > 0:
            found = {ids[i]: own} | dict(top or {})
            listed.append({str(token): {"logprob": value, "rank": 1} for token, value in found.items()})
    choice = {"text": "", "logprobs": None, "prompt_logprobs": listed}
    return [read_answer(choice, {}, choice, len(ids), False, {})]


def side(logprob: float | None, **top: float) -> Scored:
    return Scored(logprob, {int(name[1:]): value for name, value in top.items()})


@pytest.mark.parametrize(
    ("a", "b", "choice"),
    [
        (side(-0.7, t1=-0.7, t2=-0.8), side(-0.7, t1=-0.7, t2=-0.8), "same"),
        (side(-0.7, t1=-0.7, t2=-0.701), side(-0.7, t1=-0.701, t2=-0.7), "near tie"),
        (side(-0.7, t1=-0.7, t2=-2.0), side(-2.0, t1=-2.0, t2=-0.7), "other"),
        (
            side(-0.7, t1=-0.7, t2=-0.701),
            side(-0.701, t3=-0.7, t2=-0.701),
            "near tie",
        ),  # 1 is not in B's list
    ],
)
def test_near_ties_are_no_errors(a: Scored, b: Scored, choice: str) -> None:
    assert compare(0, 3, a, b, EXACT).choice == choice


def test_what_the_sentence_says() -> None:
    assert ServerDiff(EXACT).sentence() == "Nothing could be compared: no position is scored by both sides."
    assert not ServerDiff(EXACT).is_same
    unknown = compare(0, 3, side(None, t1=-0.7), side(-0.7, t1=-0.7), EXACT)
    assert unknown.error is None
    assert ServerDiff(EXACT, positions=[unknown]).is_same
    far = Compared(1, 5, 0.5, 0.1, "same", side(-0.7, t1=-0.7), side(-1.2, t1=-1.2))
    found = ServerDiff(EXACT, positions=[unknown, far])
    assert found.beyond == [far]
    assert found.sentence().endswith("first at position 5 of prompt-1.")
    both = side(-0.7, t1=-0.7, t2=-3.0), side(-3.0, t1=-3.0, t2=-0.7)
    in_prompt, in_answer = (Compared(0, i, 2.3, 0.1, "other", *both, is_answer=i > 8) for i in (2, 9))
    assert ServerDiff(EXACT, positions=[in_prompt, in_answer]).first_other is in_answer
    assert ServerDiff(EXACT, positions=[in_prompt]).first_other is in_prompt


def test_texts_that_several_tokens_share_have_no_id() -> None:
    tokenizer = Tokenizer.from_pretrained(ASSETS / "tiny-dense")
    table = ids_of_texts(tokenizer)
    (token_id,) = tokenizer.encode(" baker", add_special_tokens=False)
    assert table[" baker"] == token_id
    assert "\ufffd" not in table
