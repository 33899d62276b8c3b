"""`diptych bench serve` against a real server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diptych.shared.tools.cli import app
from tests.server.running import RunningServer, serving


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments], prog_name="diptych")


def measured(server: RunningServer, file: Path, *arguments: str) -> list[dict[str, Any]]:
    result = bench("--url", server.url, "--warm-ups", "1", "-o", str(file), *arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    found: list[dict[str, Any]] = data["results"]
    for each in found:
        assert each["num_failed"] == 0
        assert each["is_flushed"]
        for metric in ("ttft", "itl", "tpot", "e2e"):
            figures = each[f"{metric}_ms"]
            assert 0 <= figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]
    server.wait_idle()
    return found


def test_random_prompts_at_two_concurrencies(server: RunningServer, tmp_path: Path) -> None:
    lengths = ("--input-len", "20", "--output-len", "5-8", "--num-requests", "6")
    plot = tmp_path / "plot.svg"
    found = measured(
        server,
        tmp_path / "a.json",
        *lengths,
        "--concurrency",
        "1,4",
        "--plot",
        str(plot),
        "--e2e-target",
        "1",
    )
    assert [each["concurrency"] for each in found] == [1, 4]
    for each in found:
        assert each["num_complete"] == 6
        assert each["num_prompt_tokens"] == 120
        assert 30 <= each["num_output_tokens"] <= 48
        assert each["goodput"] == 0  # no request takes a millisecond
        assert each["hit_rate"] == 0  # random prompts, and the cache was flushed
    assert plot.read_text().startswith("<?xml")


def test_open_loop(server: RunningServer, tmp_path: Path) -> None:
    lengths = ("--input-len", "8", "--output-len", "4", "--num-requests", "8")
    found = measured(server, tmp_path / "a.json", *lengths, "--request-rate", "20,inf")
    assert [each["rate"] for each in found] == [20, "inf"]
    assert all(each["goodput"] == each["request_rate"] for each in found)


def test_shared_prefixes_are_found_in_the_cache(server: RunningServer, tmp_path: Path) -> None:
    sizes = ("--groups", "2", "--group-size", "3", "--shared-len", "100", "--input-len", "10")
    (found,) = measured(
        server, tmp_path / "a.json", "--workload", "shared-prefix", *sizes, "--concurrency", "1"
    )
    assert found["hit_rate"] == pytest.approx(400 / 660, abs=0.01)


def test_turns_grow_and_are_cached(server: RunningServer, tmp_path: Path) -> None:
    sizes = ("--num-requests", "2", "--num-turns", "3", "--input-len", "10", "--output-len", "4")
    (found,) = measured(server, tmp_path / "a.json", "--workload", "multi-turn", *sizes)
    assert found["num_complete"] == 6
    assert found["hit_rate"] > 0.4
    assert found["later_ttft_ms"]["mean"] > 0.0
    assert found["history_rate"] is found["new_tokens"] is None  # chats are texts


AGENTS = (
    "--workload",
    "agents",
    "--first-len",
    "100",
    "--num-turns",
    "3",
    "--input-len",
    "10",
    "--output-len",
    "6",
)
PROMPTS = [100, 116, 132, 148]


def agents_hit_rate(page_size: int) -> float:
    """Whole pages of the prompt before and its answer, whose last token has no KV."""
    return sum((each + 6 - 1) // page_size * page_size for each in PROMPTS[:-1]) / sum(PROMPTS)


def test_agents_find_their_whole_history(server: RunningServer, tmp_path: Path) -> None:
    plot = ("--plot", str(tmp_path / "plot.svg"))
    found = measured(server, tmp_path / "a.json", *AGENTS, "--concurrency", "1,3", *plot)
    for each, num_users in zip(found, (1, 3), strict=True):
        assert each["num_complete"] == 4 * num_users
        assert each["num_prompt_tokens"] == sum(PROMPTS) * num_users
        assert each["hit_rate"] == each["history_rate"] == pytest.approx(agents_hit_rate(1))
        assert each["new_tokens"] == 11
        assert len(each["ttft_by_turn_ms"]) == 4
        assert each["later_ttft_to_alone"] > 0
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


@contextmanager
def forked_server(arguments: list[str]) -> Iterator[str]:
    with serving(*arguments) as server:
        yield server.url


def test_agents_with_pages_and_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.shared.tools.bench.serve_process.own_server", forked_server)
    file, flags = tmp_path / "a.json", ("--max-total-tokens", "2048", "--device", "cpu", "--page-size", "16")
    result = bench(*flags, *AGENTS, "--concurrency", "2", "--cache-off", "1", "-o", str(file))
    assert result.exit_code == 0, result.output
    cached, off = json.loads(file.read_text())["results"]
    assert (cached["has_cache"], cached["num_complete"]) == (True, 8)
    assert cached["hit_rate"] == pytest.approx(agents_hit_rate(16))
    assert (off["has_cache"], off["num_complete"], off["hit_rate"]) == (False, 4, 0.0)
    assert off["history_rate"] == cached["history_rate"] == pytest.approx(agents_hit_rate(1))
    assert "concurrency 1, cache off" in " ".join(result.output.split())


def test_both_servers_answer_before_the_first_load(server: RunningServer) -> None:
    result = bench("--url", server.url, "--cache-off-url", "http://127.0.0.1:9", "--cache-off", "1")
    assert result.exit_code == 2
    assert "http://127.0.0.1:9/v1/models does not answer" in " ".join(result.output.split())
    assert "requests" not in result.output  # no load began


def test_recorded_chats(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    chat = [{"from": "human", "value": "What is 12 + 30?"}, {"from": "gpt", "value": "12 + 30 = 42"}]
    file.write_text(json.dumps([{"conversations": chat}]))
    (found,) = measured(server, tmp_path / "a.json", "--workload", "sharegpt", "--file", str(file))
    assert (found["num_complete"], found["num_output_tokens"]) == (1, 3)


def test_failures_are_counted_not_raised(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    lengths = ("--input-len", "3000", "--num-requests", "3", "--warm-ups", "0")
    result = bench("--url", server.url, *lengths, "-o", str(file))
    assert result.exit_code == 0, result.output
    (found,) = json.loads(file.read_text())["results"]
    assert (found["num_failed"], found["num_complete"], found["ttft_ms"]) == (3, 0, None)
    assert "status 400" in found["errors"][0]


def test_a_server_of_its_own() -> None:
    sizes = ("--num-requests", "3", "--input-len", "8", "--output-len", "4", "--warm-ups", "0")
    result = bench("--max-total-tokens", "2048", "--device", "cpu", *sizes)
    assert result.exit_code == 0, result.output
    assert "concurrency 8" in result.output
    assert "TTFT p99" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--url", "http://127.0.0.1:9", "--page-size", "4"], "--page-size is a flag of the engine"),
        (["--concurrency", "2", "--request-rate", "1"], "give one of them"),
        (["--request-rate", "fast"], "--request-rate takes numbers"),
        (["--workload", "random", "--groups", "2"], "--groups does not apply to the random workload"),
        (["--think-time", "1"], "--think-time does not apply to the random workload"),
        (["--url", "http://127.0.0.1:9", "--cache-off", "1"], "--cache-off with --url needs --cache-off-url"),
        (["--cache-off-url", "http://127.0.0.1:9"], "--cache-off-url needs --url and --cache-off"),
        (["--cache-off", "1", "--disable-radix-cache"], "nothing to compare with"),
        (["--num-requests", "0"], "--num-requests must be at least 1, got 0"),
        (["--input-len", "0"], "--input-len must be a length of at least 1"),
        (["--cache-off", "0"], "a concurrency must be at least 1, got 0"),
        pytest.param(["--model", "no-such-model"], "no-such-model", marks=pytest.mark.full),
    ],
)
def test_errors(arguments: list[str], said: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert said in result.output
