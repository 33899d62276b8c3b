"""The command starts quickly: help needs neither torch nor the engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAST = [[], ["generate"], ["bench", "offline"]]
IN_FULL = [["chat"], ["doctor"], ["bench"], ["check"], ["diff"]]
COMMANDS = [*FAST, *(pytest.param(words, marks=pytest.mark.full) for words in IN_FULL)]

PROGRAM = """
import sys
from diptych.shared.tools.cli import main
sys.argv = ["diptych", *{arguments!r}, "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "numpy", "transformers", "triton", "flashinfer", "psutil", "matplotlib"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arguments=arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


def test_our_own_modules_take_little_of_the_start() -> None:
    # -X importtime prints "import time: own us | cumulative us | name" for every module.
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import diptych.shared.tools.cli"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    rows = [line.removeprefix("import time:").split("|") for line in result.stderr.splitlines()[1:]]
    own = {name.strip(): int(own_us) for own_us, _, name in rows if name.strip().startswith("diptych")}
    assert "diptych.shared.tools.cli" in own
    # Generous against a loaded machine; measured at 6 ms. Importing torch alone would be over a second.
    assert sum(own.values()) < 500_000


def test_a_command_that_uses_triton_ends_without_warnings() -> None:
    """Triton's bindings warn about what they take for leaks."""
    pytest.importorskip("triton")
    program = "import triton, sys, diptych.shared.tools.cli as cli; sys.argv[1:] = ['--version']; cli.main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
