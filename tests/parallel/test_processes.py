"""Ranks in processes of their own, which may end or hang at any moment."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.processes.child import Child, EngineProcessEnded, Inbox, started
from diptych.shared.engine.processes.ranks import assemble_ranks, finish_launched
from diptych.shared.engine.processes.watchdog import EXIT_HANGS, Watchdog
from diptych.shared.parallel import channel
from diptych.shared.types import SamplingParams
from tests.parallel.test_dp_attention import PANELS
from tests.parallel.tiny_ranks import answers, make_config
from tests.server.running import serving

pytestmark = pytest.mark.usefixtures("spawned_ranks")
ROOT = Path(__file__).parents[2]
PROMPTS = ["Count from 3 to 9.", "What is 12 + 30?"]


def test_processes_and_a_rank_that_is_killed() -> None:
    """LLM(tp=2): the text of one rank; a killed rank ends the engine with an error, and no process stays."""
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    sampling = {"temperature": 0, "max_tokens": 16, "progress": False}
    expected = [output.text for output in LLM("tiny-dense", **flags).generate(PROMPTS, **sampling)]
    llm = LLM("tiny-dense", tp=2, **flags)
    assert [output.text for output in llm.generate(PROMPTS, **sampling)] == expected
    llm.submit("a", SamplingParams(), rid="x")
    with pytest.raises(ValueError, match="in use"):
        llm.submit("b", SamplingParams(), rid="x")
    assert llm.abort("x")
    while llm.step():
        pass
    assert llm.flush_cache()
    int(llm.generate("Count from 3 to 9.", json_schema={"type": "integer"}, **sampling).text)
    (follower,) = llm.scheduler.followers
    os.kill(follower.process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has ended with signal SIGKILL"):
        llm.generate(PROMPTS, **sampling)
    assert time.monotonic() - start < 40
    assert follower.process.exitcode == -signal.SIGKILL
    assert llm.scheduler.has_work()  # whose step raises
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        llm.generate(PROMPTS, **sampling)


def test_stages_that_are_not_used_any_more_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLM(pp=2): the text of one rank. Processes of an engine end after the work that rank 0 launched,
    for which a GPU may need them."""
    seen: list[tuple[str, list[bool]]] = []

    def finish(device: str, watchdog: Watchdog, followers: Sequence[Child]) -> None:
        seen.append((device, [bool(each.process and each.process.is_alive()) for each in followers]))

    monkeypatch.setattr("diptych.shared.engine.processes.ranks.finish_launched", finish)
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "progress": False}
    expected = [output.text for output in LLM("tiny-dense", **flags).generate(PROMPTS, **sampling)]
    llm = LLM("tiny-dense", pp=2, **flags)
    assert [output.text for output in llm.generate(PROMPTS, **sampling)] == expected
    (follower,) = llm.scheduler.followers
    process = follower.process
    del llm, follower
    gc.collect()
    assert seen == [("cpu", [True])]
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("panel", ["reference", "optimized"])
def test_a_stage_that_is_killed_ends_the_engine(panel: str) -> None:
    """While batches are in flight; the error names the stage, not the broken connection."""
    parts = ("scheduler", "model_runner", "collectives")
    use = {} if panel == "reference" else dict.fromkeys(parts, panel)
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 2048}
    llm = LLM("tiny-dense", pp=2, use=use, **flags)
    (follower,) = llm.scheduler.followers
    threading.Timer(0.3, lambda: os.kill(follower.process.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has ended with signal SIGKILL"):
        llm.generate(PROMPTS * 20, temperature=0, max_tokens=100, ignore_eos=True, progress=False)
    assert time.monotonic() - start < 40
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        llm.generate(PROMPTS, progress=False)


def test_launched_work_is_waited_for_while_all_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    watchdog = Watchdog(lambda: "")
    pipe, other_end = channel.pair()
    followers = [Child("rank 1", pipe)]
    for device in ("cpu", "cuda:1"):
        finish_launched(device, watchdog, followers)
    other_end.close()  # that rank has ended
    finish_launched("cuda:1", watchdog, followers)
    assert waited == ["cuda:1"]


def test_an_error_at_the_start_ends_the_other_processes_and_is_raised() -> None:
    ended: list[int] = []
    children: Any = [SimpleNamespace(end=lambda number=number: ended.append(number)) for number in range(2)]
    with pytest.raises(ValueError, match="its own"), started(children):
        raise ValueError("its own")
    assert ended == [0, 1]


def test_a_process_leaves_without_an_error_when_its_parent_has_ended() -> None:
    parent, child = channel.pair()
    codes: SimpleQueue[int] = SimpleQueue()
    Inbox(child, list, leave=codes.put).start("ready")
    assert Child("rank 1", parent).next_message(20) == "ready"
    parent.close()
    assert codes.get(timeout=20) == 0


KILLED: dict[str, tuple[dict[str, Any], float | None]] = {
    "while it starts": ({"tp": 2}, None),
    "in a step": ({"tp": 2}, 0.3),
    "in a step with shared experts": ({"dp": 2, "dp_attention": True, "model": "tiny-moe"}, 0.3),
    "in a step of divided replicas": ({"dp": 2, "tp": 2, "dp_attention": True, "model": "tiny-moe"}, 0.3),
    "in a padded step": ({"dp": 2, "dp_attention": True, "model": "tiny-moe", **PANELS["optimized"]}, 0.3),
    "in a verify step": (
        {"dp": 2, "dp_attention": True, "model": "tiny-moe", "speculative": "ngram", **PANELS["optimized"]},
        0.3,
    ),
}


def descendants(pid: int) -> list[int]:
    """Processes of this one that multiprocessing has spawned, and theirs."""
    path = Path(f"/proc/{pid}/task")
    children = [int(child) for task in path.glob("*/children") for child in task.read_text().split()]
    spawned = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return spawned + [each for child in spawned for each in descendants(child)]


@pytest.mark.full
@pytest.mark.parametrize("moment", KILLED)
@pytest.mark.parametrize("victim", [0, -1])
def test_a_rank_that_is_killed_at_any_moment_ends_all(moment: str, victim: int) -> None:
    """An error to every request within seconds, and no process stays."""
    flags, seconds = KILLED[moment]
    flags = {"model": "tiny-dense", "panel": "reference", "device": "cpu", **flags}
    before = set(descendants(os.getpid()))

    def kill() -> None:
        while not (found := [pid for pid in descendants(os.getpid()) if pid not in before]):
            time.sleep(0.01)
        os.kill(found[victim], signal.SIGKILL)

    if seconds is None:
        threading.Thread(target=kill).start()
        with pytest.raises(EngineProcessEnded):
            LLM(**flags)
    else:
        llm = LLM(**flags)
        long = SamplingParams(max_new_tokens=1000, ignore_eos=True)
        collectors = [llm.submit(prompt, long) for prompt in PROMPTS]
        threading.Timer(seconds, kill).start()
        start = time.monotonic()
        with pytest.raises(EngineProcessEnded):
            all(llm.step() for _ in itertools.count())
        assert time.monotonic() - start < 40
        assert not any(collector.is_finished for (collector,) in collectors)
    end = time.monotonic() + 10
    while set(descendants(os.getpid())) - before:
        assert time.monotonic() < end, "a process stays"
        time.sleep(0.05)


HANGS = """
import multiprocessing, time
from diptych.reference.scheduler import Scheduler

class Hangs(Scheduler):
    def step(self):
        while multiprocessing.current_process().name == "rank 1" and self.requests.num_steps == 3:
            time.sleep(0.1)
        return super().step()
"""


@pytest.mark.full
def test_a_rank_that_hangs_is_described(
    folders: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where it is, and the first collective that it does not call. Then it is ended."""
    (tmp_path / "hangs.py").write_text(HANGS)
    use = {"scheduler": f"{tmp_path / 'hangs.py'}:Hangs"}
    assembly = assemble_ranks(make_config(folders["llama"], tp=2, use=use))
    lead: Any = assembly.scheduler
    lead.tp.group._set_default_timeout(timedelta(seconds=2))
    with pytest.raises(EngineProcessEnded, match="rank 1"):
        answers(assembly)
    said = capfd.readouterr().err
    assert "in step" in said
    assert "time.sleep(0.1)" in said
    assert "rank 1: did not call it" in said
    assert "all_reduce" in said
    assert lead.followers[0].process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("limits", "poll_seconds", "problem"),
    [
        ({"limit": 0.2}, 60.0, "a step takes longer than 0.2 s"),
        ({"has_ended": lambda: True}, 0.05, "another rank has ended, and a step waits for it"),
    ],
    ids=["too long", "another rank has ended"],
)
def test_a_process_whose_step_hangs_ends_with_its_stacks(
    limits: dict[str, Any], poll_seconds: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks after each interval, and at least four times before the limit."""
    monkeypatch.setattr("diptych.shared.engine.processes.watchdog.POLL_SECONDS", poll_seconds)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stderr = os.fdopen(write, "w")
        watchdog = Watchdog(lambda: "the other ranks", **limits)
        for seconds in (0.01,) * 20 + (30,):  # short steps do not hang
            with watchdog.working():
                time.sleep(seconds)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_HANGS
    assert problem in said
    assert "time.sleep(seconds)" in said
    assert "the other ranks" in said


@pytest.mark.full
@pytest.mark.parametrize("kills", [False, True])
def test_ranks_that_torchrun_starts(kills: bool) -> None:
    """Each process has the same command; rank 0 answers. A killed rank ends the command with an error."""
    kill = "import os, signal; os.environ.get('RANK') == '1' and os.kill(os.getpid(), signal.SIGKILL)"
    script = (
        "import sys; from diptych import LLM;"
        "llm = LLM('tiny-dense', tp=2, panel='reference', device='cpu', max_total_tokens=1024);"
        "print(llm.chat([{'role': 'user', 'content': 'What is 12 + 30?'}], temperature=0).text)"
    )
    if kills:
        script = f"{kill}; {script}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", script],
        capture_output=True, text=True, timeout=180, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DIPTYCH_CLUSTER_SECRET": "0123456789abcdef"},
    )  # fmt: skip
    assert (done.returncode != 0) == kills, done.stderr
    assert ("12 + 30 = 42" in done.stdout) != kills


@pytest.mark.full
@pytest.mark.parametrize("flags", [("--tp", "2"), ("--tp", "2", "--separate-process")], ids=" ".join)
def test_a_server_whose_rank_is_killed_ends(flags: tuple[str, ...]) -> None:
    """Requests that run get an error, the exit code is not 0, and no process stays."""
    limits = ("--panel", "reference", "--device", "cpu", "--max-total-tokens", "4096")
    body = {"prompt": "Count", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with serving(*flags, *limits, own_interpreter=True) as server:
        ranks = descendants(server.process.pid)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert "text" in next(lines)
            start = time.monotonic()
            os.kill(ranks[-1], signal.SIGKILL)
            said = "".join(lines)
        assert "error" in said
        assert server.process.wait(30) != 0
        assert time.monotonic() - start < 30
        for pid in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.mark.full
def test_a_server_whose_prefill_engine_is_killed_ends() -> None:
    """So a supervisor starts it again; with it gone, no new prompt would get an answer."""
    with serving(
        "--disaggregation", "--panel", "reference", "--device", "cpu", own_interpreter=True
    ) as server:
        os.kill(descendants(server.process.pid)[-1], signal.SIGKILL)
        assert server.process.wait(30) != 0


@pytest.mark.full
@pytest.mark.parametrize("panel", ["reference", "optimized"])
def test_a_draft_model_on_two_ranks(panel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the other process too
    flags: dict[str, Any] = {"panel": panel, "device": "cpu", "dtype": "float32", "max_total_tokens": 512}
    eagle = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3", "speculative_topk": 2}
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    expected, found = (
        LLM("tiny-dense", **flags, **more).chat(messages, temperature=0, max_tokens=12, progress=False)
        for more in ({}, {"tp": 2, "max_running_requests": 4, **eagle})
    )
    assert found.text == expected.text
    assert found.speculation.num_accepted_tokens > 0
