"""The line about the engine's load, counters of speculation, and steps that do not overlap."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.optimized.scheduler import Scheduler
from diptych.shared.engine.build.pools import MAX_DIFFERENCE, check_equal_memory
from diptych.shared.server.engine.load_log import LoadLog
from diptych.shared.server.engine.messages import Load
from diptych.shared.server.http.metrics import Metrics
from diptych.shared.tools.conformance.oracles.scheduler_harness import SchedulerHarness

ROOT = Path(__file__).parents[2]
PROMPT = [5, 7, 11, 13]


def test_a_line_every_so_many_batches(capsys: pytest.CaptureFixture[str]) -> None:
    harness = SchedulerHarness()
    log = LoadLog(4, harness.allocator.size)
    harness.submit(PROMPT, 12)
    while harness.scheduler.has_work():
        harness.step()
        log.look(harness.scheduler)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("batch 5; running 1, waiting 0; ")
    assert "hit rate 0%" in lines[0]
    silent = LoadLog(None, 1)
    silent.look(harness.scheduler)
    assert capsys.readouterr().err == ""


def test_the_line_says_how_many_steps_overlapped() -> None:
    before = SchedulerHarness().scheduler.stats()._replace(num_steps=5, num_overlapped=3)
    now = before._replace(num_steps=9, num_overlapped=6)
    assert "3 of 4 steps overlapped" in LoadLog(4, 100).line(now, 1.0, before)
    assert "overlapped" not in LoadLog(4, 100).line(now, 1.0, now)


def test_pages_name_metrics_that_there_are() -> None:
    client: Any = SimpleNamespace(load=Load())
    text = Metrics().render(client, 100).decode()
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "shared/server/assets/grafana.json"]
    named = {name for page in pages for name in re.findall(r"diptych:([a-z_]+)", page.read_text("utf-8"))}
    assert len(named) > 15
    assert [name for name in sorted(named) if f"diptych:{name}" not in text] == []


def test_counters_of_steps() -> None:
    class Client:
        load = Load(
            num_verifications=4, num_drafted_tokens=12, num_accepted_tokens=6, num_steps=9, num_overlapped=7
        )

    client: Any = Client()
    metrics = Metrics()
    for _ in range(2):  # a second scrape counts nothing again
        text = metrics.render(client, 100).decode()
    assert "diptych:spec_verify_total 4.0" in text
    assert "diptych:spec_draft_tokens_total 12.0" in text
    assert "diptych:spec_accepted_tokens_total 6.0" in text
    assert "diptych:steps_total 9.0" in text
    assert "diptych:overlapped_steps_total 7.0" in text


def steps_of_first_tokens(**flags: Any) -> tuple[list[int], int]:
    """The steps in which three prompts that come one after the other get their first token, and the number of
    steps launched while another was in flight."""
    harness = SchedulerHarness(replace={"scheduler": Scheduler}, max_prefill_tokens=4, **flags)
    rids = [harness.submit([i + 20, *PROMPT[:3]], 6) for i in range(3)]
    found: dict[str, int] = {}
    for step in range(1, 40):
        for output in harness.step() if harness.scheduler.has_work() else []:
            found.setdefault(output.rid, step)
    for rid in rids:
        harness.expect(rid, 6)
    harness.expect_idle()
    return [found[rid] for rid in rids], harness.scheduler.stats().num_overlapped


def test_the_overlap_can_be_switched_off() -> None:
    assert steps_of_first_tokens(disable_overlap_schedule=True) == ([1, 2, 3], 0)


def test_prefills_in_a_row() -> None:
    """Each first token comes before the next prefill is launched; decode steps overlap."""
    usual, num_usual = steps_of_first_tokens()
    assert usual == [2, 3, 4]
    early, num_early = steps_of_first_tokens(disable_prefill_overlap=True)
    assert early == [1, 2, 4]
    assert num_early == num_usual - 2


def test_free_memory_of_ranks() -> None:
    check_equal_memory([10 * MAX_DIFFERENCE, 10 * MAX_DIFFERENCE - 5])
    with pytest.raises(ValueError, match=r"rank 0: 20.0 GiB, rank 1: 17.0 GiB"):
        check_equal_memory([20 * 2**30, 17 * 2**30])
