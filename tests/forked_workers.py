"""Runs tests in processes that are forked when all tests are collected. A plugin of pytest. (Each process
of pytest-xdist imports and collects all tests itself, for twenty core-seconds.)

    python -m pytest -p tests.forked_workers --forks 3
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

STOP, TEARDOWN_SECONDS = signal.SIGUSR1, 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="processes that run the tests; 0: this one does")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = min(session.config.option.forks, len(session.items))
    if number < 1 or session.testsfailed or session.config.option.collectonly:
        return None
    Run(session, number).to_the_end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


class Run:
    """Each worker has a part of the tests, in order. One that is through takes half of another one's rest."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.session, size = session, len(session.items)
        self.base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.parts = [deque(range(size * i // number, size * (i + 1) // number)) for i in range(number)]
        self.workers: dict[Any, Worker] = {}

    def to_the_end(self) -> None:
        gc.freeze()  # what is shared stays so
        try:
            for number in range(len(self.parts)):
                self.start(number)
            while self.workers and not self.session.shouldfail:
                for connection in wait([*self.workers]):
                    self.hear(self.workers[connection])
        finally:
            self.end_workers()

    def end_workers(self) -> None:
        """Behind `-x`, Ctrl-C or an error they still run tests. Their fixtures end, and so do servers."""
        pids = {worker.pid for worker in self.workers.values()}
        for pid in pids:
            os.kill(pid, STOP)
        ends_at = time.monotonic() + TEARDOWN_SECONDS
        while pids:
            pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
            if time.monotonic() > ends_at:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def start(self, number: int) -> None:
        worker = Worker(self.session, number, self.base / f"worker-{number}", [*self.workers])
        self.workers[worker.connection] = worker
        for _ in range(2):  # a test, and the next one, whose fixtures stay
            self.give(worker)

    def give(self, worker: Worker) -> None:
        part = self.parts[worker.number]
        if not part and len(longest := max(self.parts, key=len)) > 1:
            part.extendleft(longest.pop() for _ in range(len(longest) // 2))
        worker.tests.append(part.popleft() if part else None)
        with suppress(OSError):  # it has died, which is heard next
            worker.connection.send(worker.tests[-1])

    def hear(self, worker: Worker) -> None:
        config = self.session.config
        try:
            data = worker.connection.recv()
        except (EOFError, OSError):
            self.has_ended(worker)
            return
        if data:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)
        else:
            worker.tests.popleft()
            self.give(worker)

    def has_ended(self, worker: Worker) -> None:
        """A test that ends its process fails, and another process runs the rest."""
        del self.workers[worker.connection]
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not (tests := [test for test in worker.tests if test is not None]):
            self.session.shouldfail = status and f"a process has ended with status {status}"
            return
        item, said = self.session.items[tests[0]], f"its process has ended with status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
        item.config.hook.pytest_runtest_logreport(report=report)
        self.parts[worker.number].extendleft(tests[1:])
        self.start(worker.number)


class Worker:
    """`tests`: numbers of the one that runs and of the next one; None: there is no other one."""

    def __init__(self, session: pytest.Session, number: int, base: Any, others: list[Any]) -> None:
        self.number, self.tests = number, deque[int | None]()
        self.connection, theirs = Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        status = 1
        try:
            for other_end in (self.connection, *others):
                other_end.close()
            base.mkdir(exist_ok=True)
            session.config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
            work(session, theirs)
            status = 0
        except BaseException:
            session.config.pluginmanager.get_plugin("capturemanager").stop_global_capturing()
            traceback.print_exc()
        finally:
            os._exit(status)


class Reports:
    """What a worker says to the process that has forked it."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(data)


def work(session: pytest.Session, connection: Connection) -> None:
    config, plugins = session.config, session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")
    if capture.is_globally_capturing():  # into files of its own
        capture.stop_global_capturing()
        capture.start_global_capturing()
    plugins.register(Reports(config, connection))
    signal.signal(STOP, signal.default_int_handler)
    try:
        test = connection.recv()
        while test is not None:
            following = connection.recv()
            next_item = None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=session.items[test], nextitem=next_item)
            connection.send(None)  # it has ended
            test = following
    except KeyboardInterrupt:
        for each in (STOP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
