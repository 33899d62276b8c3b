"""Starting the engine from a subcommand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM


def start_llm(flags: dict[str, Any]) -> LLM:
    """`LLM(**flags)`, with a progress display on a terminal, because importing torch and loading a model take
    a while."""
    if not sys.stderr.isatty():
        return _start(flags)
    from rich.console import Console

    with Console(stderr=True).status(f"loading {flags.get('model', 'the model')} ..."):
        return _start(flags)


def _start(flags: dict[str, Any]) -> LLM:
    from diptych.shared.engine.quick_start import quick_start

    with quick_start():
        from diptych.shared.engine.llm import LLM

        return LLM(**flags)
