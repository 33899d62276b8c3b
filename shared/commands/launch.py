"""Starting the engine from a subcommand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.engine import LLM


def start_engine(flags: dict[str, Any]) -> LLM:
    """`LLM(**flags)`. Importing torch and loading a model take a while: a terminal shows that they go on."""
    if not sys.stderr.isatty():
        return _start(flags)
    from rich.console import Console

    with Console(stderr=True).status(f"loading {flags.get('model', 'the model')} ..."):
        return _start(flags)


def _start(flags: dict[str, Any]) -> LLM:
    from shared.engine import LLM

    return LLM(**flags)
