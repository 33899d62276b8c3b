"""The exit status of commands in every mode, each in a process of its own: threads and processes of an engine
that answers can still abort the command when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, runpy, sys, threading
names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: sys.stderr.write(f"threads at the end: {names()}"))  # called last
runpy.run_module("diptych", run_name="__main__")
"""
FLAGS = {"panel": "reference", "device": "cpu", "dtype": "float32", "max-total-tokens": "2048"}
HEAD = {"speculative": "eagle3", "speculative-draft-model": "tiny-dense-eagle3"}
MODES: dict[str, dict[str, str]] = {
    "plain": {},
    "overlap": {"use": "scheduler=optimized"},
    "tp": {"tp": "2"},
    "pp": {"pp": "2"},
    "dp": {"dp": "2"},
    "dp attention": {"model": "tiny-moe", "dp": "2", "ep": "2", "dp-attention": "true"},
    "ep": {"model": "tiny-moe", "tp": "2", "ep": "2"},
    "disaggregation": {"disaggregation": "true"},
    "n-gram": {"speculative": "ngram"},
    "eagle3": HEAD,
    "eagle3 tp": HEAD | {"tp": "2"},
    "tiers": {"hicache-tokens": "1024", "hicache-dir": "DIR", "hicache-dir-tokens": "4096"},
    "int8": {"quantization": "int8"},
    "deterministic": {"deterministic": "true"},
}
TOKENS, PROMPT, SMALL = (
    ("--max-new-tokens", "4"),
    "What is 12 + 30?",
    ("--input-len", "8", "--output-len", "4"),
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", *TOKENS, PROMPT),
    "json": ("generate", "--json", *TOKENS, PROMPT),
    "chat": ("chat", *TOKENS),
    "diff": ("diff", "--prompt", PROMPT, *TOKENS),
    "eval": ("eval", "--formats", "fp8-kv", "--questions", "2"),
    "offline": ("bench", "offline", "--no-limit", *SMALL),
    "latency": ("bench", "latency", "--no-limit", *SMALL),
    "soak": ("soak", "--seconds", "0"),
}


def options(mode: dict[str, str], of_diff: bool) -> list[str]:
    """The flags of a mode as options; of `diff` those of side B."""
    flags, words = FLAGS | mode, []
    if of_diff:
        panel = flags.pop("panel")
        words = ["--a", panel, "--b", flags.pop("use", panel), "--b-flags"]
        of_both = {name: flags.pop(name) for name in ("device", "dtype", "model") if name in flags}
        words.append(",".join(f"{name.replace('-', '_')}={value}" for name, value in flags.items()))
        flags = of_both
    options = [word for name, value in flags.items() for word in (f"--{name}", value) if word != "true"]
    return [*words, *options]


COMPARED = ("plain", "overlap", "tiers", "deterministic", "n-gram", "eagle3")
REFUSED = {("diff", mode) for mode in ("pp", "dp", "dp attention")} | {
    ("soak", mode) for mode in MODES if mode not in COMPARED
}
"""`diff` needs one process that computes all; random flags and requests of `soak` exclude most modes."""
FAST = [("generate", "disaggregation")]
"""In the fast cut: threads and processes."""


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        pytest.param(command, mode, marks=[] if (command, mode) in FAST else pytest.mark.full)
        for command in COMMANDS
        for mode in MODES
        if (command, mode) != ("soak", "int8")  # rounded inputs make the last bits larger than its tolerance
    ],
)
def test_exit_status(command: str, mode: str, tmp_path: Path) -> None:
    words = [*COMMANDS[command], *options(MODES[mode], command == "diff")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(word.replace("DIR", str(tmp_path)) for word in words)],
        input="Hello\n/exit\n", capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == (2 if (command, mode) in REFUSED else 0), done.stdout + done.stderr
    threads = done.stderr.rpartition("threads at the end: ")[2]
    assert "MainThread" in threads
    assert "transport" not in threads  # these hold tensors
