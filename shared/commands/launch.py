"""Starting the engine from a subcommand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.engine import LLM


def start_engine(flags: dict[str, Any]) -> LLM:
    """`LLM(**flags)`. A terminal shows that importing torch goes on; the engine itself shows how far loading
    is."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting ..."):
            import torch  # noqa: F401  takes a second or two

    from shared.engine import LLM

    return LLM(**flags)
