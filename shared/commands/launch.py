"""Starting the engine from a subcommand."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.engine.llm import LLM

SMALL_MODEL = 50_000_000
"""Parameters below which one CPU thread is best: threads wait for each other at the end of every product, and
products this small take less time than the wait, far less when other programs use the cores too."""


def start_engine(flags: dict[str, Any]) -> LLM:
    """`LLM(**flags)`. Importing torch and loading a model take a while: a terminal shows that they go on."""
    if not sys.stderr.isatty():
        return _start(flags)
    from rich.console import Console

    with Console(stderr=True).status(f"loading {flags.get('model', 'the model')} ..."):
        return _start(flags)


def _start(flags: dict[str, Any]) -> LLM:
    from shared.engine.llm import LLM

    llm = LLM(**flags)
    use_one_thread_for_a_small_model(llm)
    return llm


def use_one_thread_for_a_small_model(llm: LLM) -> None:
    """The process is ours here, so its settings are; OMP_NUM_THREADS says otherwise."""
    import torch

    num_parameters = sum(parameter.numel() for parameter in llm.assembly.model.parameters())
    if num_parameters < SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
