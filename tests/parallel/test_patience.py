"""A late rank: it compiles, does nothing, or has ended. The compiler is a process that computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.parallel.collectives import Collectives
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes.child import Child, Inbox, reported_end
from diptych.shared.engine.processes.child_messages import Ready
from diptych.shared.engine.processes.ranks import assemble_ranks
from diptych.shared.parallel import patience
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.meeting import local_store, open_store
from diptych.shared.parallel.patience import meet
from tests.parallel.tiny_ranks import answers, make_config

LIMIT, LATE = 1.5, 3.6  # seconds: the late rank comes long after the limit


def compile_slowly(seconds: float = LATE) -> None:
    text = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", text], check=True)


def do_nothing() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late_rank(before: Callable[[], None], path: str, pipe: Channel) -> None:
    inbox = Inbox(pipe, list)
    with reported_end(inbox), torch.inference_mode():
        ranks = Collectives(open_store(path, 2), 1, 2, 60.0)
        before()
        ranks.barrier()
        inbox.send(Ready(ranks.all_reduce(torch.ones(1)).item()))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Rank 0 beside a rank that does something before it comes."""
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(patience, "SAY_SECONDS", 1.0)
    children: list[Child] = []

    def start(before: Callable[[], None]) -> tuple[Collectives, Child]:
        store = local_store(2)
        child = Child.spawn("rank 1", late_rank, before, store.path)
        children.append(child)
        ranks = Collectives(store, 0, 2, 60.0)
        ranks._limit = timedelta(seconds=LIMIT)
        return ranks, child

    yield start
    for child in children:
        child.end()


def test_a_rank_that_compiles_is_waited_for(beside: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ranks, child = beside(compile_slowly)
    start = time.monotonic()
    ranks.barrier()
    assert time.monotonic() - start > LIMIT + 1
    assert ranks.all_reduce(torch.ones(1)).item() == child.next_message(60.0) == 2.0
    assert "rank 0 waits for rank 1, which works" in capfd.readouterr().err


def test_a_rank_that_does_nothing_is_not(beside: Any) -> None:
    ranks, _ = beside(do_nothing)
    with pytest.raises(
        RuntimeError, match=f"rank 1 is missing: its process has done nothing for {LIMIT:g} s"
    ):
        ranks.barrier()


def test_a_rank_that_has_ended_is_missing_at_once(beside: Any) -> None:
    ranks, _ = beside(die)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 is missing: process \d+ has ended"):
        ranks.barrier()
    assert time.monotonic() - start < LIMIT


def test_a_rank_on_another_computer_counts_as_working(monkeypatch: pytest.MonkeyPatch) -> None:
    store = local_store(2)
    store.set("process of 1", "1 elsewhere")
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(patience, "LONGEST", 0.5)
    with pytest.raises(RuntimeError, match=r"rank 1 is missing for 0\.5 s"):
        meet(store, "a", 0, 2, 0.2)
    store.set("b 1", "")
    meet(store, "b", 0, 2, 0.2)


SLOW_RUNNER = """
import multiprocessing
from diptych.reference.model_runner import ModelRunner
from tests.parallel.test_patience import compile_slowly

class SlowRunner(ModelRunner):
    def prepare(self, config, sampler, num_token_ids):
        if multiprocessing.current_process().name == "rank 1":
            compile_slowly(14.0)
        super().prepare(config, sampler, num_token_ids)
"""


@pytest.mark.full  # the limit has room for collectives on a busy computer
def test_an_engine_starts_although_a_rank_compiles(folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_RUNNER)
    use = {"model_runner": f"{tmp_path / 'slow.py'}:SlowRunner"}
    expected = [req.output_ids for req in answers(assemble(make_config(folders["llama"])))]
    slow = assemble_ranks(make_config(folders["llama"], tp=2, use=use), time_limit=10.0)
    assert [req.output_ids for req in answers(slow)] == expected
