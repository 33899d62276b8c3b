"""A process of the engine as its parent sees it, and how it says that it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.shared.engine.processes import child
from diptych.shared.engine.processes.child import (
    Child,
    EngineProcessEnded,
    Inbox,
    describe_all,
    first_end,
    reported_end,
    stacks_of_all_threads,
    started,
)
from diptych.shared.engine.processes.child_messages import Answer, Ready, Report
from diptych.shared.engine.processes.child_messages import encode as encode_answer
from diptych.shared.engine.processes.input_log import Call, encode
from diptych.shared.parallel import channel
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.collective_log import Entry

pytestmark = pytest.mark.usefixtures("spawned_ranks")
ENTRY = Entry(1, "all_reduce", "tp", (2, 3), "float32", "decoder.py:7")


def send(pipe: Channel, answer: Answer) -> None:
    pipe.send(encode_answer(answer))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "REPORT_SECONDS", 0.05)


@pytest.fixture
def ends() -> Iterator[tuple[Child, Channel]]:
    mine, theirs = channel.pair()
    yield Child("rank 1", mine), theirs
    theirs.close()


def process_with(exitcode: int | None) -> Any:
    return SimpleNamespace(pid=None, exitcode=exitcode, join=lambda *_: None, kill=lambda: None)


@pytest.mark.parametrize(
    ("process", "description"),
    [
        (None, "rank 1 has closed its connection, or does not answer"),
        (process_with(None), "rank 1 does not answer"),
        (process_with(0), "rank 1 has ended with exit code 0"),
        (process_with(3), "rank 1 has ended with exit code 3"),
        (process_with(-9), "rank 1 has ended with signal SIGKILL"),
    ],
)
def test_how_it_ended(process: Any, description: str) -> None:
    mine, theirs = channel.pair()
    other = Child("rank 1", mine, process)
    assert other.describe_end() == description
    with pytest.raises(EngineProcessEnded, match=rf"^{description}$"):
        other.next_message(0.0)  # none comes
    theirs.close()
    with pytest.raises(EngineProcessEnded, match=rf"^{description}$"):
        other.next_message(20.0)  # none can come


def test_a_message_of_the_start_and_an_error_instead(ends: tuple[Child, Channel]) -> None:
    other, pipe = ends
    send(pipe, Ready("ready"))
    send(pipe, Report("stacks", "no memory"))
    assert other.next_message(20.0) == "ready"
    with pytest.raises(EngineProcessEnded, match=r"^rank 1 does not start: no memory$"):
        other.next_message(20.0)


def test_a_report_is_found_among_other_messages(ends: tuple[Child, Channel]) -> None:
    other, pipe = ends
    assert other.report() is None
    assert pipe.receive() == encode(Call("report", 0.0))
    send(pipe, Ready("outputs"))
    send(pipe, Report("stacks"))
    assert other.report() == Report("stacks")
    pipe.close()
    assert other.report() is None


def send_disabled_bar(pipe: Channel) -> None:
    from tqdm.auto import tqdm

    with tqdm(total=2) as bar:
        send(pipe, Ready(bar.disable))


@pytest.mark.parametrize("before", [None, pytest.param("0", marks=pytest.mark.full)])
def test_progress_is_drawn_by_the_first_process(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is not None:
        monkeypatch.setenv("TQDM_DISABLE", before)
    other = Child.spawn("rank 1", send_disabled_bar)
    assert other.next_message(60.0) is True
    assert os.environ.get("TQDM_DISABLE") == before
    other.end()


def test_a_running_process_reports(ends: tuple[Child, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "REPORT_SECONDS", 20.0)
    other, pipe = ends
    inbox = Inbox(pipe, lambda: [ENTRY], leave=lambda code: None)
    inbox.start("ready")
    assert other.next_message(20.0) == "ready"
    other.call(encode(Call("abort", 0.0, rid="a")))
    report = other.report()
    assert report is not None
    assert report.log == [ENTRY]
    assert "test_a_running_process_reports" in report.stacks
    assert [call.rid for call in inbox.calls(is_busy=False)] == ["a"]
    assert list(inbox.calls(is_busy=True)) == []


def test_a_call_that_came_before_it_could_be_heard(
    ends: tuple[Child, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard before the step that was called with it: a step of ranks cannot go on without it."""
    monkeypatch.setattr(child, "REPORT_SECONDS", 20.0)
    other, pipe = ends
    inbox = Inbox(pipe, list, leave=lambda code: None)
    inbox.listen()
    other.call(encode(Call("step", 0.0)))
    other.call(encode(Call("regroup", 0.0, arguments=[1, [0, 2], "path"])))
    assert other.report() is not None  # the calls before it have been read
    heard: list[Call] = []
    inbox.hear = heard.append
    assert [call.method for call in inbox.calls(is_busy=True)] == ["step", "regroup"]
    assert [call.arguments for call in heard] == [[1, [0, 2], "path"]]


def test_stacks_have_the_names_of_threads() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, name="another")
    thread.start()
    stacks = stacks_of_all_threads()
    is_over.set()
    thread.join()
    assert "thread MainThread:\n" in stacks
    assert "thread another:\n" in stacks
    assert "test_stacks_have_the_names_of_threads" in stacks


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("no memory")])
def test_an_end_is_reported(
    ends: tuple[Child, Channel], monkeypatch: pytest.MonkeyPatch, error: Exception | None, is_ready: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other, pipe = ends
    codes: list[int] = []
    ignored: list[int] = []
    monkeypatch.setattr(child.os, "_exit", codes.append)
    monkeypatch.setattr(child.signal, "signal", lambda *given: ignored.extend(given))
    inbox = Inbox(pipe, list)
    inbox.is_ready = is_ready
    with reported_end(inbox):
        print("written")
        if error is not None:
            raise error
    assert ignored == [signal.SIGINT, signal.SIG_IGN]
    assert codes == [0 if error is None else 1]
    said = capfd.readouterr()
    assert said.out == "written\n"
    assert ("Traceback" in said.err) == (error is not None and is_ready), "else the parent prints it"
    if error is not None:
        report: Any = other.receive()
        place = sys._getframe().f_code.co_filename.rpartition("/")[2]
        assert report.error.startswith(f"ValueError: no memory ({place}:")
    assert not other.pipe.poll()


def fail_when_called(pipe: Channel) -> None:
    inbox = Inbox(pipe, list)
    with reported_end(inbox):
        inbox.start("ready")
        next(inbox.calls(is_busy=False))
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("parent_ends", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_a_child_misses_while_its_parent_ends_is_no_error(
    parent_ends: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    other = Child.spawn("rank 1", fail_when_called)
    assert other.next_message(60.0) == "ready"
    other.call(encode(Call("step", 0.0)))
    if parent_ends:
        other.pipe.close()
    assert other.process is not None
    other.process.join(60.0)
    assert other.process.exitcode == (0 if parent_ends else 1)
    assert ("connection reset" in capfd.readouterr().err) == (not parent_ends)


def test_an_error_of_the_start_names_the_process_that_has_ended(ends: tuple[Child, Channel]) -> None:
    other, pipe = ends
    send(pipe, Ready())
    send(pipe, Report("", "no memory"))
    other.receive()
    with pytest.raises(EngineProcessEnded, match=r"^rank 1 has ended: no memory$"), started([other]):
        raise RuntimeError("timeout")
    assert other.pipe.is_closed
    mine, theirs = channel.pair()
    silent = [Child("rank 1", mine)]
    with (
        pytest.raises(EngineProcessEnded, match=r"^the ranks do not find each other: timeout$"),
        started(silent),
    ):
        raise RuntimeError("timeout")
    theirs.close()
    with pytest.raises(EngineProcessEnded, match=r"^its own$"), started([]):
        raise EngineProcessEnded("its own")


def test_the_first_that_has_ended(ends: tuple[Child, Channel]) -> None:
    other, pipe = ends
    mine, theirs = channel.pair()
    children = [Child("rank 2", mine), other]
    assert first_end(children) is None
    send(pipe, Ready())
    assert first_end(children) is None, "a message of a process that runs"
    pipe.close()
    assert first_end(children) == "rank 1 has closed its connection, or does not answer"
    theirs.close()


def test_what_all_of_them_say() -> None:
    reports = [Report("stacks 1", "error 1"), Report("stacks 2")]
    children: Any = [
        SimpleNamespace(name=f"rank {i}", report=lambda report=report: report)
        for i, report in enumerate(reports, 1)
    ]
    expected = ["rank 1: error 1", "stacks 1", "rank 2: ", "stacks 2"]
    agree = "the collectives of all ranks agree"
    assert describe_all(children, []).splitlines() == [*expected, agree]
    children.append(SimpleNamespace(name="rank 3", report=lambda: None))
    assert describe_all(children, []).splitlines() == expected, "logs that are not complete"
