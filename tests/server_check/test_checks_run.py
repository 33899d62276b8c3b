"""Dependence, streams, sampling, semantics: a correct server passes, and a difference is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
import pytest

from diptych.shared.tools.conformance.server.answer import Answer
from diptych.shared.tools.conformance.server.checks import QUICK, Context, Finding, Result, chosen, run_checks
from diptych.shared.tools.conformance.server.logprob_tolerance import TABLE
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.same import difference
from diptych.shared.tools.conformance.server.sampling import judge_greedy
from diptych.shared.tools.conformance.server.session import connect
from diptych.shared.tools.conformance.server.verdict import Report, figure_lines
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Reply
from tests.server_check.local_server import LocalServer

LIMITS = dataclasses.replace(QUICK, num_prompts=3, max_tokens=5, long_prompt_len=70, num_draws=120)


@pytest.fixture(scope="module")
def context(correct_server: LocalServer) -> Iterator[Context]:
    context = connect(correct_server.url, "tiny-dense", dtype="float32", limits=LIMITS)
    yield context
    context.server.close()


@pytest.mark.full  # in the fast cut, test_faults_are_found.py has the same checks
@pytest.mark.parametrize("group", ["dependence", "streaming", "semantics"])
def test_a_correct_server_passes(context: Context, group: str) -> None:
    found = list(run_checks(context, chosen([group])))
    assert {result.check.name: result.findings for result in found if result.status == "fails"} == {}
    assert [result.check.name for result in found if result.status == "not offered"] == []


def test_a_check_alone_asks_what_it_asks_in_a_whole_run(proxied: LocalServer, oracle: Oracle) -> None:
    asked: list[str] = []

    async def record(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
        asked.append(json.dumps(body, sort_keys=True))
        return await ask(body)

    proxied.proxy.plant(record)
    found = []
    for seed, before in ((3, ["dependence.shared_prefix"]), (3, []), (4, [])):
        context = connect(proxied.url, "tiny-dense", dtype="float32", limits=LIMITS, oracle=oracle, seed=seed)
        asked.clear()
        assert all(result.status == "holds" for result in run_checks(context, chosen([*before, NEXT])))
        context.server.close()
        found.append(set(asked))
    assert found[1] < found[0]
    assert found[1].isdisjoint(found[2])


def test_an_error_of_a_check_is_a_finding_and_the_others_go_on(context: Context) -> None:
    def wrong(context: Context) -> Finding:
        raise KeyError("no such row")

    broken = dataclasses.replace(chosen([NEXT])[0], run=wrong)
    found = list(run_checks(context, [broken, *chosen(["dependence.repeat"])]))
    assert [result.status for result in found] == ["fails", "holds"]
    assert "does not know: KeyError: 'no such row'" in found[0].findings[0].what


NEXT = "dependence.prefix_cache"
SAMPLING = ["sampling.top_k", "sampling.same_seed", "sampling.logprob_temperature"]


def test_a_correct_sampler_passes(context: Context) -> None:
    found = list(run_checks(context, chosen(SAMPLING)))
    assert {result.check.name: result.findings for result in found if result.status == "fails"} == {}
    assert {result.check.name for result in found if result.num_cases} == set(SAMPLING)


@pytest.mark.full
def test_a_correct_sampler_passes_all_checks(context: Context) -> None:
    context = dataclasses.replace(context, limits=QUICK)
    found = list(run_checks(context, chosen(["sampling"])))
    assert {result.check.name: result.findings for result in found if result.status == "fails"} == {}


def test_what_is_not_offered_is_no_failure(context: Context) -> None:
    without = {
        "n": False,
        "chat": False,
        "stream": False,
        "seed": False,
        "top_k": False,
        "echo_logprobs": False,
    }
    offers = dataclasses.replace(context.offers, **without)
    names = ["dependence.n", "streaming.same_answer", "semantics.chat", "semantics.echo", "sampling.top_k"]
    found = list(run_checks(dataclasses.replace(context, offers=offers), chosen(names)))
    assert [result.status for result in found] == ["not offered"] * len(names)


SCORES = ("logprobs", "top_logprobs", "prompt_logprobs", "echo")


def test_a_server_without_log_probabilities(proxied: LocalServer, oracle: Oracle) -> None:
    """Streams and the semantics of the API are checked all the same."""

    async def without_scores(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
        return await ask({name: value for name, value in body.items() if name not in SCORES})

    proxied.proxy.plant(without_scores)
    context = connect(proxied.url, "tiny-dense", dtype="float32", limits=LIMITS, oracle=oracle)
    checks = chosen(["scoring", "streaming", "semantics.stop", "semantics.n"])
    results = list(run_checks(context, checks))
    context.server.close()
    report = Report({}, context.offers, results, len(checks))
    assert report.sentence.endswith("nothing was compared with the reference: no log-probabilities")
    assert (report.failing, report.exit_status) == ([], 2)
    statuses = {result.check.name: result.status for result in results}
    assert statuses["scoring.prompt"] == statuses["scoring.continuation"] == "not offered"
    assert [name for name, status in statuses.items() if status != "holds" and name[:7] != "scoring"] == []


def answer(tokens: str, logprobs: list[float], other: float = -9.0, text: str | None = None) -> Answer:
    """`other`: log-probability of the token x, which stands beside each token."""
    tops = tuple({token: value, "x": other} for token, value in zip(tokens, logprobs))
    text = tokens if text is None else text
    return Answer(None, tuple(tokens), text, tuple(logprobs), tops, None, "length", None, None)


def test_equal_answers_may_differ_within_the_tolerance() -> None:
    one, other = answer("ab", [-1.0, -2.0]), answer("ab", [-1.0005, -2.0])
    assert difference(one, other, TABLE["float32"]) is None


def test_a_difference_is_found_where_it_is() -> None:
    expected = answer("ab", [-1.0, -2.0])
    for actual, position, what in (
        (answer("ab", [-1.0, -2.5]), 1, "the log-probabilities differ"),
        (answer("xb", [-1.0, -2.0]), 0, "the tokens differ"),
        (answer("a", [-1.0]), 1, "the lengths differ"),
        (answer("ab", [-1.0, -2.0], text="a b"), 2, "the texts of the same tokens differ"),
    ):
        found = difference(expected, actual, TABLE["float32"])
        assert found is not None
        assert (found.position, found.what, found.is_tie) == (position, what, False)


@pytest.mark.parametrize(
    ("gap", "status"), [(0.0, "holds"), (0.5, "near tie"), (2.0, "near tie"), (9.0, "fails")]
)
def test_a_greedy_token_is_not_far_from_the_best(context: Context, gap: float, status: str) -> None:
    """In bfloat16 a few tokens of an answer may be beyond the limit of 0.6, but not by any amount."""
    rows = np.full((8, 3), -30.0)
    rows[:, 0] = -1e-9
    rows[3, 1] = -gap or -30.0
    ids = (0, 0, 0, int(gap > 0), 0, 0, 0, 0)
    answer = Answer(ids, ("",) * 8, "", None, None, None, "length", None, None)
    own = rows[np.arange(8), ids]
    half = dataclasses.replace(context, tolerance=TABLE["bfloat16"])
    assert judge_greedy(half, answer, rows, rows.max(1) - own, own).status == status


def test_tokens_that_are_as_likely_are_a_near_tie() -> None:
    expected = answer("a", [-1.0], other=-1.001)
    found = difference(expected, answer("x", [-1.0]), TABLE["float32"])
    assert found is not None
    assert not found.is_tie  # a is not in the list of the other answer
    tie = dataclasses.replace(answer("x", [-1.0]), top_logprobs=({"x": -1.0, "a": -1.001},))
    found = difference(expected, tie, TABLE["float32"])
    assert found is not None
    assert found.is_tie


@pytest.mark.parametrize("dtype", TABLE)
def test_another_text_is_no_near_tie(dtype: str) -> None:
    """Its lists have other values, in a format of any precision."""
    expected = answer("ab", [-0.2, -0.3])
    found = difference(expected, answer("cd", [-0.2, -0.3]), TABLE[dtype])
    assert found is not None
    assert (found.position, found.is_tie) == (0, False)


def test_a_sampled_token_is_no_near_tie() -> None:
    """The second answer has a token that its own list does not rank first."""
    tops = ({"a": -1.0, "x": -1.1},)
    expected = dataclasses.replace(answer("a", [-1.0]), top_logprobs=tops)
    sampled = dataclasses.replace(answer("x", [-1.1]), top_logprobs=tops)
    found = difference(expected, sampled, TABLE["bfloat16"])
    assert found is not None
    assert not found.is_tie


def test_an_answer_that_ended_early_is_a_near_tie_if_its_end_is_as_likely() -> None:
    ended = dataclasses.replace(answer("a", [-1.0]), finish_reason="stop")
    for end, is_tie in ((-1.1, True), (-5.0, False)):
        tops: tuple[dict[int | str, float], ...] = ({"a": -1.0, "x": -9.0}, {"b": -1.0, 7: end})
        longer = dataclasses.replace(answer("ab", [-1.0, -1.0]), top_logprobs=tops)
        found = difference(longer, ended, TABLE["bfloat16"], frozenset({7}))
        assert found is not None
        assert found.is_tie is is_tie


def test_a_report_says_what_a_check_would_have_found() -> None:
    finding = Finding("holds", "greedy tokens", evidence={"smallest fault found": "3.0 %", "flips": 1})
    (check,) = chosen(["seeded.greedy"])
    assert figure_lines([Result(check, (finding, Finding("holds")))]) == [
        "seeded.greedy        greedy tokens; smallest fault found 3.0 %"
    ]
