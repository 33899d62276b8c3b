"""Loads of a server: arrivals, figures and workloads, without a server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.tools.bench import serve_client, serve_plot
from diptych.shared.tools.bench.serve_client import Client, Outcome, _take
from diptych.shared.tools.bench.serve_load import Arrivals, LoadResult, Targets, run_load
from diptych.shared.tools.bench.serve_rows import rows
from diptych.shared.tools.bench.serve_workloads import (
    Agents,
    MultiTurn,
    RandomPrompts,
    SharedPrefixes,
    ShareGpt,
    Turn,
)
from diptych.shared.tools.commands.bench_run import Progress
from diptych.shared.tools.commands.bench_serve import ServeBenchmark


def outcome(*chunk_times: float, start: float = 0.0, num_tokens: int | None = None) -> Outcome:
    found = Outcome(start, chunk_times[-1], list(chunk_times), num_prompt_tokens=10, num_cached_tokens=4)
    found.num_output_tokens = len(chunk_times) if num_tokens is None else num_tokens
    return found


def test_times_of_one_request() -> None:
    found = outcome(1.5, 1.6, 1.9, start=1.0, num_tokens=5)
    assert found.time_to_first_token == pytest.approx(0.5)
    assert found.time_per_output_token == pytest.approx(0.1)  # 0.4 s for 4 tokens, in two chunks
    assert found.total_time == pytest.approx(0.9)
    assert outcome(2.0).time_per_output_token is None


def test_figures_of_a_load() -> None:
    result = LoadResult(Arrivals(rate=2.0), Targets(ttft=600, tpot=150), seconds=4.0)
    result.outcomes = [
        outcome(0.5, 0.6, 0.7),
        outcome(0.7, 0.8, 0.9),  # the first token comes too late
        outcome(0.5, 0.7, 0.9),  # the others come too slowly
        outcome(0.1),  # one token: no time per token to miss
        Outcome(0.0, 1.0, error="status 500"),
    ]
    figures = result.as_json()
    assert (figures["num_complete"], figures["num_failed"], figures["errors"]) == (4, 1, ["status 500"])
    assert figures["request_rate"] == 1.0
    assert figures["goodput"] == 0.5
    assert figures["output_tokens_per_s"] == 10 / 4
    assert figures["hit_rate"] == pytest.approx(0.4)
    assert figures["ttft_ms"]["p50"] == pytest.approx(500)
    assert figures["ttft_ms"]["max"] == pytest.approx(700)
    assert figures["itl_ms"]["mean"] == pytest.approx(800 / 6)
    assert LoadResult(Arrivals(rate=1.0), Targets(), seconds=1.0).summary("itl") is None


def test_figures_of_turns() -> None:
    result = LoadResult(Arrivals(concurrency=2), Targets(), seconds=9.0, alone=[0.1, 0.2, 0.3])
    turns = [(0, 0, (0.5, 3.0)), (0, 0, (2.0, 2.1)), (1, 8, (3.5, 3.6, 3.7)), (1, 6, (4.5, 4.6, 5.1))]
    for turn, history_len, times in turns:
        each = outcome(*times, start=3.0 * turn)
        each.turn, each.history_len = turn, history_len
        result.outcomes.append(each)
    figures = result.as_json()
    assert (figures["history_rate"], figures["new_tokens"]) == (14 / 40, 3)  # 2 and 4 of 10
    assert figures["first_ttft_ms"]["p50"] == pytest.approx(1250)
    assert figures["ttft_by_turn_ms"] == pytest.approx([1250, 1000])
    assert figures["later_ttft_to_alone"] == pytest.approx(5)
    assert figures["tokens_per_s_per_user"] == pytest.approx(10 / (3.0 + 2.1 + 0.7 + 2.1))
    assert figures["steady_itl_ms"]["max"] == pytest.approx(500)  # 2.5 s began before the other's first token
    assert (figures["max_itl_to_median"], figures["late_itl"]) == (pytest.approx(5), 1 / 5)
    assert "late_itl" not in LoadResult(Arrivals(rate=1.0), Targets(), seconds=1.0).as_json()
    labels = [name for name, _ in rows([result])]
    assert {"TTFT p99, ms", "E2E p50, ms", "E2E p99, ms"} <= set(labels)
    for each in result.outcomes:
        each.history_len = 0  # as of chats of text
    assert result.as_json()["history_rate"] is None
    unknown = {"hit rate, whole history", "new tokens alone: TTFT p50, ms", "later turns / alone"}
    assert [name for name, _ in rows([result])] == [name for name in labels if name not in unknown]


def test_a_plot_has_other_lines_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figure, axes = serve_plot.new_figure("")
    monkeypatch.setattr(serve_plot, "new_figure", lambda title: (figure, axes))
    results = [LoadResult(Arrivals(concurrency=each), Targets(), seconds=1.0) for each in (1, 4, 2)]
    results[2].has_cache = False
    serve_plot.plot_loads(tmp_path / "plot.svg", "", results)
    found = {str(line.get_label()): list(line.get_xdata()) for line in axes.get_lines()}  # type: ignore[arg-type]
    cached, off = [1, 4], [2]
    assert found == dict(zip(("complete", "goodput"), (cached, cached))) | {
        "complete, cache off": off,
        "goodput, cache off": off,
    }


def test_arrivals_are_a_poisson_process() -> None:
    intervals = list(islice(Arrivals(rate=5.0).intervals(seed=0), 4000))
    mean = sum(intervals) / len(intervals)
    assert mean == pytest.approx(0.2, rel=0.05)
    spread = math.sqrt(sum((each - mean) ** 2 for each in intervals) / len(intervals))
    assert spread == pytest.approx(mean, rel=0.1)  # of an exponential distribution
    assert intervals == list(islice(Arrivals(rate=5.0).intervals(seed=0), 4000))
    assert set(islice(Arrivals(rate=math.inf).intervals(seed=0), 5)) == {0.0}


class FakeClient:
    """Each turn takes 20 ms."""

    def __init__(self) -> None:
        self.num_live = self.most_live = 0

    async def run(self, conversation: list[Turn]) -> AsyncIterator[Outcome]:
        for _ in conversation:
            self.num_live += 1
            self.most_live = max(self.most_live, self.num_live)
            await asyncio.sleep(0.02)
            self.num_live -= 1
            yield outcome(0.01)


@pytest.mark.parametrize(("arrivals", "most"), [(Arrivals(concurrency=3), 3), (Arrivals(rate=math.inf), 12)])
def test_loops(arrivals: Arrivals, most: int) -> None:
    client, result = FakeClient(), LoadResult(arrivals, Targets())
    asyncio.run(run_load(client, [[Turn("a", 1), Turn("b", 1)]] * 12, result))  # type: ignore[arg-type]
    assert client.most_live == most
    assert len(result.outcomes) == 24
    assert result.seconds > 0


def test_a_server_that_does_not_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int] | str] = []

    class Recorder(Client):
        async def connect(self, model: str | None) -> None:
            """There is no server."""

        async def request(self, turn: Turn, *_: Any, **__: Any) -> Outcome:
            prompts.append(turn.prompt)
            return outcome(0.1)

    monkeypatch.setattr(serve_client, "Client", Recorder)
    benchmark = ServeBenchmark([Arrivals(concurrency=1)], RandomPrompts(3), {}, Targets(), num_warm_ups=2)
    benchmark.model = None
    asyncio.run(benchmark.measure_loads("http://127.0.0.1:9", benchmark.cases, Progress()))
    assert len(prompts) == len(set(map(str, prompts))) == 5  # the prompts of warm-ups are others
    (note,) = benchmark.notes(benchmark.results)
    assert note.startswith("concurrency 1: the server does not flush its prefix cache")


@pytest.mark.parametrize("arrivals", [{}, {"rate": 1, "concurrency": 1}, {"rate": 0}, {"concurrency": 0}])
def test_arrivals_that_make_no_sense(arrivals: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|give either"):
        Arrivals(**arrivals)  # type: ignore[arg-type]


def test_what_counts_as_output() -> None:
    found = Outcome(0.0)
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"reasoning_content": "b"}, {}]
    for number, delta in enumerate(deltas):
        _take({"choices": [{"index": 0, "delta": delta}]}, found, float(number))
    _take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, found, 9.0)
    assert found.chunk_times == [1.0, 2.0]
    assert (found.text, found.num_prompt_tokens, found.num_output_tokens) == ("a", 3, 2)
    _take({"choices": [{"index": 0, "text": ""}]}, found, 10.0)  # of /v1/completions, every one
    assert found.chunk_times[-1] == 10.0
    _take({"error": {"message": "gone"}}, found, 11.0)
    assert found.error == "gone"


# ---- workloads ----


def test_random_prompts() -> None:
    conversations = RandomPrompts(20, (5, 9), (2, 4), seed=3).conversations(100)
    assert len(conversations) == 20
    for (turn,) in conversations:
        assert 5 <= len(turn.prompt) <= 9
        assert 2 <= turn.output_len <= 4
        assert all(isinstance(token, int) and 0 <= token < 100 for token in turn.prompt)
    assert conversations == RandomPrompts(20, (5, 9), (2, 4), seed=3).conversations(100)


def test_shared_prefixes() -> None:
    conversations = SharedPrefixes(3, 4, 16, (5, 5), (2, 2)).conversations(100)
    starts = [tuple(turn.prompt[:16]) for (turn,) in conversations]
    assert sorted(starts.count(start) for start in set(starts)) == [4, 4, 4]
    assert all(len(turn.prompt) == 21 for (turn,) in conversations)


def test_multi_turn() -> None:
    conversations = MultiTurn(num_requests=3, num_turns=4, input_len=(6, 6)).conversations(0)
    assert [len(conversation) for conversation in conversations] == [4, 4, 4]
    texts = [str(turn.prompt) for conversation in conversations for turn in conversation]
    assert {len(text.split()) for text in texts} == {6}
    assert all(before != after for before, after in pairwise(texts))


def test_agents() -> None:
    agents = Agents(2, num_turns=2, input_len=(6, 6), output_len=(3, 3), first_len=(40, 40), think_time=0.5)
    conversations = agents.conversations(50)
    assert [[len(turn.prompt) for turn in each] for each in conversations] == [[40, 6, 6]] * 2
    assert [[turn.think_time for turn in each] for each in conversations] == [[0.0, 0.5, 0.5]] * 2
    assert conversations[0][0].prompt[0] != conversations[1][0].prompt[0]
    assert conversations == agents.conversations(50)


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_prompt_of_ids_has_the_turns_before(has_ids: bool) -> None:
    client, sent = Client("http://127.0.0.1:9"), []

    async def request(turn: Turn, history: list[int], with_token_ids: bool) -> Outcome:
        assert with_token_ids
        sent.append(list(history))
        found = outcome(1.0, num_tokens=3)
        found.token_ids = [7, 8, 9] if has_ids else []
        return found

    async def run() -> list[Outcome]:
        return [each async for each in client.run([Turn([1, 2], 3), Turn([3], 3), Turn([4, 5], 3)])]

    client.request = request  # type: ignore[method-assign,assignment]
    outcomes = asyncio.run(run())
    if has_ids:
        assert sent == [[1, 2], [1, 2, 7, 8, 9, 3], [1, 2, 7, 8, 9, 3, 7, 8, 9, 4, 5]]
        assert [each.history_len for each in outcomes] == [0, 4, 8]  # 9 of each answer has no KV
    else:
        assert sent == [[1, 2], [1, 2, 1, 2, 1, 3], [1, 2, 1, 2, 1, 3, 3, 3, 3, 4, 5]]
        assert [each.history_len for each in outcomes] == [0, 2, 6]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"first_len": (3, 2)}, "--first-len must be a length of at least 1, or two in order, got 3-2"),
        ({"num_turns": 0}, "--num-turns must be at least 1, got 0"),
        ({"think_time": -1.0}, "--think-time must be 0 or more seconds, got -1.0"),
        ({"think_time": math.nan}, "--think-time must be 0 or more seconds, got nan"),
    ],
)
def test_agents_that_make_no_sense(numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Agents(**numbers)


def test_sharegpt(tmp_path: Path) -> None:
    def chat(*said: tuple[str, str]) -> dict[str, object]:
        return {"conversations": [{"from": who, "value": what} for who, what in said]}

    file = tmp_path / "chats.json"
    good = chat(("human", "q?"), ("gpt", "a" * 41), ("human", "more?"))
    bad = [chat(("gpt", "a"), ("human", "b")), chat(("human", "q")), {}, {"conversations": [1, 2]}, 7]
    file.write_text(json.dumps([good, *bad]))
    assert ShareGpt(file, num_requests=5).conversations(0) == [[Turn("q?", 10)]]
    file.write_text(json.dumps(bad))
    with pytest.raises(ValueError, match="no chat in which a human begins"):
        ShareGpt(file).conversations(0)
    file.write_text("{")
    with pytest.raises(ValueError, match="cannot read chats"):
        ShareGpt(file).conversations(0)
    with pytest.raises(ValueError, match="needs --file"):
        ShareGpt().conversations(0)
