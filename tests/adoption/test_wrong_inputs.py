"""Wrong inputs of `check server`, `check engine`, `check kernel`, `export trace`, the pytest plugin and the
action: one line that names what is wrong, exit status 2 (4 for options of pytest), and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from tests.conformance.test_github_action import STEPS
from tests.conformance.test_github_action import environment as variables_of
from tests.house.tree import ROOT

MODEL = ("-m", "tiny-dense")
FEW = ("--num-prompts", "2", "--num-tokens", "1", "--device", "cpu")
NO_MODELS = {"html": "<html>", "broken": "{", "list": "[]", "none": '{"data": []}', "number": '{"data": 3}'}
NORM = ("--like", "rms_norm")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "cache.py").write_text("class Cache: pass\n")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    return tmp_path


@pytest.fixture
def answering() -> Iterator[Callable[[str], str]]:
    """The URL of a server that answers everything with this text."""
    servers = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


def refused(*words: str, says: str) -> list[str]:
    """The lines of the command, whose last one is the error."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.output.splitlines()
    assert says in result.output
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in result.output
    return lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("http://127.0.0.1:9",), "--model, what it serves"),
        (("http://127.0.0.1:9", *MODEL), "no server answers: http://127.0.0.1:9"),
        (("http://[bad", *MODEL), "'http://[bad' is not the URL of a server"),
        (("file", *MODEL), "'file' is not the URL of a server"),
        (("http://127.0.0.1:abc", *MODEL), "Invalid port: 'abc'"),
        (("http://127.0.0.1:9", *MODEL, "--tool-call-parser", "nope"), "got 'nope'"),
        (("http://no-such-host.invalid", *MODEL), "no server answers"),
        (("http://127.0.0.1:9", "-m", "missing"), "no model 'missing'"),
        (("http://127.0.0.1:9", "-m", "file"), "file is a file; a model is a folder"),
        (("http://127.0.0.1:9", "-m", "empty"), "no config.json"),
        (("http://127.0.0.1:9", "-m", "list"), "list holds no tokenizer"),
        (("http://127.0.0.1:9", *MODEL, "--only", "nope"), "no check or group nope; there are api, scoring"),
        (("http://127.0.0.1:9", *MODEL, "--only", "api.nope"), "there are api, api.model; see --list"),
        (("http://127.0.0.1:9", *MODEL, "--dtype", "float12"), "got 'float12'"),
        (("http://127.0.0.1:9", *MODEL, "--within", "nan"), "Invalid value for '--within'"),
        (("http://127.0.0.1:9", *MODEL, "--json", "empty"), "empty is a folder"),
        (("http://127.0.0.1:9", *MODEL, "--json", "a", "--html", "a"), "a is named for two results"),
    ],
)
def test_check_server(folder: Path, words: tuple[str, ...], says: str) -> None:
    lines = refused("check", "server", *words, says=says)
    assert len(lines) == 1 + ("no server answers" in says)


@pytest.mark.parametrize("text", NO_MODELS.values(), ids=NO_MODELS)
def test_check_server_of_what_is_no_server(answering: Callable[[str], str], text: str) -> None:
    refused("check", "server", answering(text), *MODEL, says="/v1/models lists no model")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nope", *FEW), "got 'nope'"),
        ((",", *FEW), "A names no engine, got ','"),
        (("reference", "--against", "", *FEW), "--against names no engine, got ''"),
        (("reference,nope=1", *FEW), "unknown flag nope"),
        (("reference,attention=missing.py:X", *FEW), "no such file: missing.py"),
        (("reference,attention=empty:X", *FEW), "cannot import empty"),
        (("reference,page_size=-1", *FEW), "page_size must be an integer >= 1, got -1"),
        (("reference,dtype=float12", *FEW), "got 'float12'"),
        (("reference", *FEW, "-m", "file"), "file is a file; a model is a folder"),
        (("reference", *FEW, "-m", "list"), "list/config.json: expected an object with keys, found []"),
        (("reference", *FEW, "--margin", "nan"), "Invalid value for '--margin'"),
        (("reference", *FEW, "--junit", "missing/x"), "no folder"),
        (("reference", "--num-prompts", "2", "--num-tokens", "1000000"), "tiny-dense has room for"),
    ],
)
def test_check_engine(folder: Path, words: tuple[str, ...], says: str) -> None:
    assert len(refused("check", "engine", *words, says=says)) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "DIR"),
        (("file", "--op", "rmsnorm"), "cannot write into"),
        (("file/x", "--op", "rmsnorm"), "cannot write into"),
        (("/proc/x", "--op", "rmsnorm"), "cannot write into /proc"),
        (("x", "--op", "nope"), "--op nope: it can be gemm, rmsnorm"),
        (("x", "--op", ""), "--op : it can be gemm, rmsnorm"),
        (("x", "--seed", "-1"), "Invalid value for '--seed'"),
        (("x", "--seed", str(2**64)), "Invalid value for '--seed'"),
        (("x", "--seed", "1.5"), "Invalid value for '--seed'"),
        (("x", "y"), "unexpected extra argument"),
    ],
)
def test_export_trace(folder: Path, words: tuple[str, ...], says: str) -> None:
    assert len(refused("export", "trace", *words, says=says)) == 1
    assert (folder / "file").read_text() == "mine"
    assert not (folder / "x").exists()


@pytest.mark.parametrize("target", ["missing.py:f", "empty.py:f", "missing.py", "file:f"])
def test_check_kernel_names_a_missing_file_before_it_announces_a_time(folder: Path, target: str) -> None:
    (folder / "empty.py").mkdir()
    says = f"no such file: {target[:-2]}" if ":" in target else "names no function"
    says = "file is not a .py file" if target == "file:f" else says
    (line,) = refused("check", "kernel", target, *NORM, says=says)
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("line", "says"), [("os._exit(0)", "ended with exit code 0"), ("raise SystemExit(0)", "SystemExit: 0")]
)
def test_check_kernel_says_that_a_module_ends_its_process(folder: Path, line: str, says: str) -> None:
    (folder / "ends.py").write_text(f"import os\n{line}\n")
    assert "error: " in refused("check", "kernel", "ends.py:norm", *NORM, says=says)[-1]


CACHE = ("--diptych", "cache.py:Cache", "--component", "radix_cache")
PLUGIN = [
    (("--diptych", "missing.py:X", "--component", "radix_cache"), 2, "no such file: "),
    (("--diptych", "empty:X", "--component", "radix_cache"), 2, "has no 'X'"),
    (("--diptych", "empty/:X", "--component", "radix_cache"), 2, "cannot import"),
    (("--diptych", "broken.py:X", "--component", "radix_cache"), 2, "SyntaxError"),
    (("--diptych", "cache.py:Nope", "--component", "radix_cache"), 2, "has no 'Nope'"),
    (("--diptych", "nonsense", "--component", "radix_cache"), 2, "no such implementation"),
    (("--diptych", "cache.py:Cache", "--component", "nope"), 4, "no contract for 'nope'"),
    (("--diptych", "cache.py:Cache"), 4, "add --component NAME"),
    ((*CACHE, "--diptych-contract", "99.0"), 4, "newer than this Diptych"),
    ((*CACHE, "--diptych-clause", "nope"), 2, "no clause nope"),
    ((*CACHE, "--diptych-time-limit", "-1"), 4, "--diptych-time-limit must be a number of seconds above 0"),
    ((*CACHE, "--diptych-time-limit", "nan"), 4, "seconds above 0, got nan"),
    ((*CACHE, "--diptych-time-limit", "x"), 4, "invalid float value: 'x'"),
]
PROGRAM = """
import contextlib, io, json, sys
import pytest
for words in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", sys.argv[2], *words])
    print(json.dumps([int(status), text.getvalue()]))
"""


def test_pytest_plugin(folder: Path) -> None:
    """All in one process, which imports torch once."""
    module = "diptych.shared.tools.conformance.pytest_plugin"
    words = json.dumps([each[0] for each in PLUGIN])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words, module], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (given, status, says), line in zip(PLUGIN, done.stdout.splitlines(), strict=True):
        found, text = json.loads(line)
        assert (found, says in text, "Traceback" in text) == (status, True, False), (given, text)


@pytest.mark.parametrize(
    ("inputs", "status", "says"),
    [
        ({"component": "radix_cache"}, 2, "need a target"),
        ({"contract": "1.0"}, 2, "need a target"),
        ({"target": "cache.py:Cache"}, 2, "name the component that cache.py:Cache implements"),
        ({"command": "kernel a.py:f", "target": "cache.py:Cache"}, 2, "'command' excludes target"),
        ({"command": "kernel a.py:f", "arguments": "-x"}, 2, "'command' excludes target"),
        pytest.param({"command": "nope"}, 2, "'nope'", marks=pytest.mark.full),
        pytest.param({"command": "kernel a.py:f --like rms_norm"}, 2, "no such file", marks=pytest.mark.full),
        pytest.param({"command": "kernel a.py:f --like '"}, 2, "rms_norm", marks=pytest.mark.full),
        pytest.param({"command": "server file -m tiny-dense"}, 2, "is not the URL", marks=pytest.mark.full),
        pytest.param({"command": "engine reference", "report": "no/x"}, 2, "no folder",
                     marks=pytest.mark.full),
        pytest.param({"target": "missing.py:X", "component": "radix_cache"}, 2, "no such file",
                     marks=pytest.mark.full),
        pytest.param({"target": "cache.py:Cache", "component": "nope"}, 4, "no contract for",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_action(folder: Path, inputs: dict[str, str], status: int, says: str) -> None:
    plugin = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugin["PYTEST_PLUGINS"] = "diptych.shared.tools.conformance.pytest_plugin"
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", STEPS["Check"]["run"]]
    variables = {**os.environ, **plugin, **paths, **variables_of("Check", **inputs)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert (done.returncode, says in text, "Traceback" in text) == (status, True, False), text
