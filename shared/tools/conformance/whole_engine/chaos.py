"""Chaos: real servers under load, whose processes are killed at random moments.

A round starts a server in one mode. Clients ask all the time. Processes whose loss a server survives are
killed first, then one whose loss ends it, or it gets SIGTERM. No text is wrong, no client waits for ever,
nothing is left: no slot of a pool, no open file, no process.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from diptych.shared.engine.processes.cluster_secret import SECRET
from diptych.shared.tools.conformance.whole_engine.chaos_clients import Clients, Question, questions

ROOT = Path(__file__).parents[4]
MARK = "DIPTYCH_SOAK"
"""A variable that all processes of a round inherit."""
START_SECONDS = 180.0
END_SECONDS = 90.0
"""For a server to notice the loss of a process, and to end; for what it has started to end with it."""
EXIT_ENGINE_DIED = 70
SURVIVED = ("grammar worker", "resource tracker")
"""Their work is done again. No request gets an error."""
NUM_ANSWERS = 3
"""Right answers after each loss."""
SPARE_FILES = 3
"""Open files that an idle server may have more than before: of threads that have not closed theirs."""


@dataclass(frozen=True)
class Mode:
    """`child`: what the processes are that the engine has started."""

    flags: tuple[str, ...] = ()
    child: str = ""
    model: str = "tiny-dense"
    num_servers: int = 1  # more than one: behind a router
    num_prefill: int = 0  # of these, the ones that compute the prompts of the others


MODES = {
    "one process": Mode(("--in-process",)),
    "engine apart": Mode(),
    "dp": Mode(("--dp", "3"), "replica"),
    "tp": Mode(("--tp", "2"), "rank"),
    "pp": Mode(("--pp", "2"), "rank"),
    "tp, pp": Mode(("--tp", "2", "--pp", "2"), "rank"),
    "dp attention": Mode(("--dp", "2", "--dp-attention"), "replica in step", "tiny-moe"),
    "disaggregation": Mode(("--disaggregation",), "prefill engine"),
    "shared memory": Mode(("--disaggregation", "--use", "transport=shared_memory"), "prefill engine"),
    "router": Mode(("--in-process",), num_servers=2),
    "split servers": Mode(num_servers=4, num_prefill=2),
    "split servers, tp": Mode(("--tp", "2"), "rank", num_servers=4, num_prefill=2),
}


@dataclass
class Tally:
    """What the rounds have done."""

    num_rounds: int = 0
    num_answers: int = 0
    num_failed: int = 0  # requests that got an error, or whose connection was closed
    killed: Counter[str] = field(default_factory=Counter)  # by kind of process

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.killed.items()))
        return f"{self.num_answers} right answers, {self.num_failed} requests without one; ended: {kinds}"


class Server:
    """A command in a process of its own. `url`: once it is ready."""

    def __init__(self, arguments: Sequence[str], mark: str, folder: str, child: str = "") -> None:
        self.child = child
        self.name = arguments[0]
        self.log = Path(folder, f"log {uuid.uuid4().hex}")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {MARK: mark, SECRET: mark, "TMPDIR": folder, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", "from diptych.shared.tools.cli import main; main()", *arguments],
                env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.url = ""

    def wait_ready(self) -> None:
        self.url = _until(f"{self.name} starts", START_SECONDS, self._found_url)

    def _found_url(self) -> str:
        assert self.popen.poll() is None, f"{self.name} has ended: {self.log.read_text()}"
        found = re.search(r" at (http://\S+)", self.log.read_text())
        return found[1] if found else ""

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """Those that run now, by kind."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.popen.pid)
            found.append(("router" if self.name == "route" else "API", main))
            for process in main.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append((self._kind(process), process))
        return found

    def _kind(self, process: psutil.Process) -> str:
        command = " ".join(process.cmdline())
        for kind in SURVIVED:
            if kind.replace(" ", "_") in command or kind.replace(" ", ".") in command:
                return kind
        is_engine = process.ppid() == self.popen.pid and "--in-process" not in self.popen.args  # type: ignore[operator]
        return "engine" if is_engine else self.child

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=END_SECONDS, trust_env=False).raise_for_status().json()

    def check_idle(self) -> None:
        """Pools are whole."""

        def is_idle() -> bool:
            info = self.get("/server_info")
            load = info["load"]
            return info["num_live_requests"] == load["num_running"] == load["num_waiting"] == 0

        _until("all requests end", END_SECONDS, is_idle)
        load = self.get("/server_info")["load"]
        assert load["num_used_tokens"] == load["num_evictable_tokens"], f"slots without an owner: {load}"
        httpx.post(self.url + "/flush_cache?timeout=20", timeout=END_SECONDS).raise_for_status()
        assert self.get("/server_info")["load"]["num_used_tokens"] == 0, "the cache is empty"

    def num_files(self) -> int:
        return sum(process.num_fds() for kind, process in self.processes() if kind not in SURVIVED)


def _until(what: str, seconds: float, holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return found


class Chaos:
    """Rounds of these modes in turn."""

    def __init__(self, modes: Sequence[str] = tuple(MODES)) -> None:
        for name in modes:
            if name not in MODES:
                raise ValueError(f"--mode must be one of {', '.join(MODES)}, got {name!r}")
        self.modes = modes
        self._questions: dict[str, list[Question]] = {}

    def round(self, seed: int, tally: Tally, say: Callable[[str], None] = lambda what: None) -> None:
        """Raises `AssertionError`, with the output of the servers."""
        rng = random.Random(seed)
        name = self.modes[seed % len(self.modes)]
        mode, mark = MODES[name], uuid.uuid4().hex
        if mode.model not in self._questions:
            self._questions[mode.model] = questions(mode.model)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            play = Round(mode, rng, tally, mark, folder, lambda what: say(f"{name}: {what}"))
            try:
                play.run(self._questions[mode.model])
                play.check_nothing_left()
            except Exception as error:
                logs = "\n".join(log.read_text() for log in Path(folder).glob("log *"))
                raise AssertionError(f"{name}: {error!r}\n{logs}") from error
            finally:
                for process in marked(mark):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        tally.num_rounds += 1


class Round:
    """One server, or several behind a router."""

    def __init__(
        self,
        mode: Mode,
        rng: random.Random,
        tally: Tally,
        mark: str,
        folder: str,
        say: Callable[[str], None],
    ) -> None:
        self.mode = mode
        self.rng = rng
        self.tally = tally
        self.mark = mark
        self.folder = folder
        self.say = say
        apart = () if "--in-process" in mode.flags else ("--separate-process",)
        arguments = [
            *("serve", "--port", "0", "--model", mode.model, "--device", "cpu", "--panel", "reference"),
            *("--dtype", "float32", "--max-total-tokens", "2048", "--drain-seconds", "60", *apart),
        ]
        self.servers = []
        for number in range(mode.num_servers):
            split = ("--disaggregation-mode", "prefill" if number < mode.num_prefill else "decode")
            flags = [*mode.flags, *(split if mode.num_prefill else ())]
            self.servers.append(Server([*arguments, *flags], mark, folder, mode.child))

    def run(self, asked: list[Question]) -> None:
        rng, servers = self.rng, self.servers
        if self.mode.num_servers == 1 and rng.random() < 0.15:
            self._end_while_it_starts()
            return
        self.say("starts")
        for server in servers:
            server.wait_ready()
        front = servers[0]
        if self.mode.num_servers > 1:
            front = Server(["route", "--port", "0", *self._urls()], self.mark, self.folder)
            servers.append(front)
            front.wait_ready()
            _until("the router is ready", START_SECONDS, lambda: _is_ready(front))
        with self._clients(front.url, asked) as clients:
            clients.wait(2 * NUM_ANSWERS)
        num_files = [server.num_files() for server in servers if self._is_idle(server)]
        with self._clients(front.url, asked) as clients:
            clients.wait(NUM_ANSWERS)
            self._lose_what_is_survived(clients)
        for server, before in zip(servers, num_files):
            if self._is_idle(server) and self.mode.child != "replica":  # those have ended for good
                most = before + SPARE_FILES
                _until("files are closed", 20.0, partial(_has_at_most, server, most))
        if self.mode.num_servers > 1:
            self._lose_a_server(front, asked)
        self._end(front, asked)

    def _urls(self) -> list[str]:
        """Arguments of the router."""
        num = self.mode.num_prefill
        urls = [server.url for server in self.servers]
        if not num:
            return urls
        kinds = ["--prefill"] * num + ["--decode"] * (len(urls) - num)
        return [each for pair in zip(kinds, urls, strict=True) for each in pair]

    @contextlib.contextmanager
    def _clients(self, url: str, asked: list[Question]) -> Iterator[Clients]:
        with Clients(url, asked, self.rng.randrange(10**6)) as clients:
            yield clients
        assert not clients.problems, clients.problems[:5]
        self.tally.num_answers += clients.num_answers
        self.tally.num_failed += clients.num_failed

    def _is_idle(self, server: Server) -> bool:
        """Checks that a server has no more than it needs. False: it is a router, which has no pools."""
        if server.name == "serve":
            server.check_idle()
        return server.name == "serve"

    def _kill(self, server: Server, kinds: Sequence[str], number: int = signal.SIGKILL) -> str | None:
        """End a process of one of these kinds; returns its kind."""
        found = [(kind, process) for kind, process in server.processes() if kind in kinds]
        if not found:
            return None
        kind, process = self.rng.choice(sorted(found, key=lambda each: each[1].pid))
        how = "" if number == signal.SIGKILL else " (SIGTERM)"
        self.say(f"ends {kind}{how}")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        self.tally.killed[kind + how] += 1
        return kind

    def _pause(self) -> None:
        time.sleep(self.rng.choice([0.0, self.rng.random() * 0.2, self.rng.random()]))

    def _lose_what_is_survived(self, clients: Clients) -> None:
        server = self.rng.choice([each for each in self.servers if each.name == "serve"])
        kinds = [*SURVIVED, *SURVIVED, *(["replica"] * 2 if self.mode.child == "replica" else [])]
        self.rng.shuffle(kinds)
        for kind in kinds:
            self._pause()
            num_failed = clients.num_failed
            if self._kill(server, [kind]) is not None:
                clients.wait(NUM_ANSWERS)
                if kind == "grammar worker":  # a grammar is tried twice: the second worker must live
                    clients.ask_constrained()
                is_well = kind == "replica" or clients.num_failed == num_failed
                assert is_well, f"errors without a {kind}: {clients.last_failure}"
                assert httpx.get(server.url + "/health", timeout=END_SECONDS).status_code == 200

    def _lose_a_server(self, front: Server, asked: list[Question]) -> None:
        with self._clients(front.url, asked) as clients:
            clients.wait(NUM_ANSWERS)
            self._pause()
            lost = self.servers.pop(self.rng.randrange(self.mode.num_servers))
            self._kill(lost, [self.rng.choice(["API", self.mode.child or "API"])])
            lost.popen.wait(END_SECONDS)
            clients.wait(2 * NUM_ANSWERS)

    def _end(self, front: Server, asked: list[Question]) -> None:
        """Kill what no server survives, or end it by SIGTERM, while clients ask."""
        is_killed = self.rng.random() < 0.8
        with self._clients(front.url, asked) as clients:
            clients.wait(NUM_ANSWERS)
            self._pause()
            if is_killed:
                fatal = ["API", "engine", "router", *({self.mode.child} - {"replica"})]
                present = {kind for kind, _ in front.processes()}
                kind = self._kill(front, [self.rng.choice(sorted(present & set(fatal)))])
                expected = -signal.SIGKILL if kind in ("API", "router") else EXIT_ENGINE_DIED
            else:
                kind, expected = self._kill(front, ["API", "router"], signal.SIGTERM), 0
            self._check_exit(front, expected)
        for server in self.servers:
            if server is not front:
                self._is_idle(server)
                self._kill(server, ["API"], signal.SIGTERM)
                self._check_exit(server, 0)
        if expected != -signal.SIGKILL:
            _until("no file is left", END_SECONDS, lambda: not self._files())

    def _files(self) -> list[Path]:
        """Return the files of the servers, beside their output."""
        return [path for path in Path(self.folder).iterdir() if not path.name.startswith("log ")]

    def _end_while_it_starts(self) -> None:
        (server,) = self.servers
        time.sleep(self.rng.random() * 6)
        kind = self._kill(server, ["API", "engine", self.mode.child, *SURVIVED])
        if kind in SURVIVED or (kind == "replica" and server.popen.poll() is None):
            time.sleep(1.0)
            self._kill(server, ["API"])
        server.popen.wait(END_SECONDS)
        assert server.popen.returncode != 0

    def _check_exit(self, server: Server, expected: int) -> None:
        try:
            code = server.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{server.name} has not ended within {END_SECONDS:g} s") from None
        if server.name == "route" and expected == 0:
            return  # uvicorn ends itself by the signal
        assert code == expected, f"{server.name} has ended with {code} instead of {expected}"

    def check_nothing_left(self) -> None:
        _until("every process ends", END_SECONDS, lambda: not marked(self.mark))


def _is_ready(server: Server) -> bool:
    return httpx.get(server.url + "/ready", timeout=END_SECONDS, trust_env=False).is_success


def _has_at_most(server: Server, num_files: int) -> bool:
    return server.num_files() <= num_files


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have inherited the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables: Mapping[str, str] = process.environ()
            if variables.get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
