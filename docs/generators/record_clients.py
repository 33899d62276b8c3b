"""Run public clients against a server of this tree and record what happened.

    python -m docs.generators.record_clients [FOLDER] [NAME ...]

The scripts are those of docs/examples/clients, which fail when an answer is not as expected. Each Python
client has a virtual environment of its own below FOLDER (build/clients), which is made and filled from the
package registry if it is not there; Node's packages share one. What cannot be installed is recorded as not
run. The server has the built-in model with a longer context: instructions of agents have many tokens.
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
RECORD = ROOT / "docs" / "samples" / "clients.json"
INSTALL_SECONDS, RUN_SECONDS = 900, 300

_HEAD = re.compile(r'(?:"""|// |# )(.+?): (.+?)\.\s+(?:// |# )?(pip|npm) install (.+)\n')


class Client(NamedTuple):
    """What the first lines of a script say. The first package names the client's environment."""

    name: str
    does: str
    manager: str  # pip, npm
    packages: list[str]
    script: Path


def clients() -> list[Client]:
    found = []
    for path in sorted((ROOT / "docs" / "examples" / "clients").iterdir()):
        head = _HEAD.match(path.read_text("utf-8"))
        assert head is not None, path
        name, does, manager, packages = head.groups()
        found.append(Client(name, does, manager, packages.split(), path))
    return found


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
    facts = {"date": datetime.date.today().isoformat(), "version": ""}
    is_node = client.manager == "npm"
    home = folder / ("npm" if is_node else client.packages[0])
    try:
        (_install_node if is_node else _install_python)(client, home)
        facts["version"] = _version(client, home)
    except (OSError, subprocess.SubprocessError) as error:
        return {**facts, "result": f"not run: it cannot be installed here ({type(error).__name__})"}
    script = client.script.read_text("utf-8")
    command = {  # Node looks for packages from where it runs if its script is no file
        ".py": [str(home / "bin" / "python"), "-c", script],
        ".mjs": ["node", "--input-type=module", "-e", script],
        ".sh": ["bash", "-c", script],
    }[client.script.suffix]
    tools = home / "node_modules" / ".bin" if is_node else home / "bin"
    environment = {**os.environ, "URL": url, "PATH": f"{tools}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, timeout=RUN_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {**facts, "result": f"failed: not finished after {RUN_SECONDS} s"}
    if done.returncode:
        print(done.stdout[-1000:], done.stderr[-2000:], file=sys.stderr)
    return {**facts, "result": "passed" if not done.returncode else "failed"}


def _install_python(client: Client, home: Path) -> None:
    if not home.is_dir():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", *client.packages]
        subprocess.run(pip, check=True, timeout=INSTALL_SECONDS)


def _install_node(client: Client, home: Path) -> None:
    if not (home / "node_modules" / client.packages[0]).is_dir():
        home.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--no-audit", "--no-fund", *client.packages]
        subprocess.run(install, cwd=home, check=True, timeout=INSTALL_SECONDS)


def _version(client: Client, home: Path) -> str:
    package = client.packages[0]
    if client.manager == "npm":
        return str(
            json.loads((home / "node_modules" / package / "package.json").read_text("utf-8"))["version"]
        )
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = str(home / "bin" / "python")
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    assert find_spec("fastapi"), "recording needs the extra server"
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/clients"), sys.argv[2:])
