"""Run public clients against a server of this tree and record what happened.

    python -m docs.generators.record_clients [FOLDER] [NAME ...]

The scripts are those of docs/examples/clients, which say how to install the client and fail when an answer is
not as expected. Each has a virtual environment of its own below FOLDER (build/clients), which is made if it
is not there. What cannot be installed is recorded as not run. The server has the built-in model with a longer
context: instructions of agents have many tokens.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "examples" / "clients"
RECORD = ROOT / "docs" / "samples" / "clients.json"
INSTALL_SECONDS, RUN_SECONDS = 900, 300

_HEAD = re.compile(r'(?:"""|// |# )(.+?): (.+?)\.\s+(?:// |# )?((?:pip|npm) install (\S+).*)\n')
_VERSION = re.compile(r"^(?:Version: |\W+ \S+@)(\S+)", re.MULTILINE)  # of pip show, npm list
COMMANDS = {
    ".py": ("python", "-c"),
    ".mjs": ("node", "--input-type=module", "-e"),  # which looks for packages from where it runs
    ".sh": ("bash", "-c"),
}
"""Suffix of a script -> the command that runs its text."""


class Client(NamedTuple):
    """What the first lines of a script say."""

    name: str
    does: str
    install: str
    package: str
    script: Path


def clients() -> list[Client]:
    heads = {path: _HEAD.match(path.read_text("utf-8")) for path in sorted(SCRIPTS.iterdir())}
    return [
        Client(head[1], head[2], head[3], head[4], path) for path, head in heads.items() if head is not None
    ]


def main(folder: Path, names: list[str]) -> None:
    from tests.server.running import serving  # not where pages are built

    found = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    with tempfile.TemporaryDirectory() as model:
        shutil.copytree(ROOT / "shared" / "assets" / "tiny-dense", model, dirs_exist_ok=True)
        config = Path(model) / "config.json"
        text = re.sub(r'("max_position_embeddings": *)\d+', r"\g<1>65536", config.read_text("utf-8"))
        config.write_text(text, "utf-8")
        flags = ("--model", model, "--served-model-name", "tiny-dense", "--max-total-tokens", "140000")
        with serving(*flags, "--tool-call-parser", "hermes") as server:
            for client in clients():
                if not names or client.name in names:
                    found[client.name] = _record(client, folder.resolve(), server.url)
                    print(client.name, found[client.name]["result"], flush=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def _record(client: Client, folder: Path, url: str) -> dict[str, Any]:
    home = folder / client.package.replace("/", "-")
    path = f"{home}/bin:{home}/node_modules/.bin:{os.environ['PATH']}"
    environment = {**os.environ, "URL": url, "PATH": path}
    environment.pop("PYTHONPATH", None)

    def run(*command: str, timeout: int = INSTALL_SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, check=True, timeout=timeout
        )

    facts = {"date": str(datetime.date.today()), "version": ""}
    try:
        if not home.is_dir():
            home.mkdir(parents=True)
            run(sys.executable, "-m", "venv", ".")
            run("bash", "-c", client.install)
        ask = ("pip", "show") if client.install.startswith("pip") else ("npm", "list", "--depth=0")
        if (version := _VERSION.search(run(*ask, client.package).stdout)) is not None:
            facts["version"] = version[1]
    except (OSError, subprocess.SubprocessError) as error:
        return {**facts, "result": f"not run: it cannot be installed here ({type(error).__name__})"}
    try:
        run(*COMMANDS[client.script.suffix], client.script.read_text("utf-8"), timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return {**facts, "result": f"failed: not finished after {RUN_SECONDS} s"}
    except subprocess.CalledProcessError as error:
        print(error.stdout[-1000:], error.stderr[-2000:], file=sys.stderr)
        return {**facts, "result": "failed"}
    return {**facts, "result": "passed"}


if __name__ == "__main__":
    assert find_spec("fastapi"), "recording needs the extra server"
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/clients"), sys.argv[2:])
