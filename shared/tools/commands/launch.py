"""Starting the engine from a subcommand."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.engine.build.assembly import Assembly
    from diptych.shared.engine.llm import LLM

SMALL_MODEL = 50_000_000
"""The number of parameters below which one CPU thread is best. Threads synchronize at the end of every GEMM.
Small GEMMs take less time than that, and far less when other programs use the cores too."""


def start_llm(flags: dict[str, Any]) -> LLM:
    """`LLM(**flags)`, with a progress display on a terminal, because importing torch and loading a model take
    a while."""
    if not sys.stderr.isatty():
        return _start(flags)
    from rich.console import Console

    with Console(stderr=True).status(f"loading {flags.get('model', 'the model')} ..."):
        return _start(flags)


def _start(flags: dict[str, Any]) -> LLM:
    from diptych.shared.engine.llm import LLM

    llm = LLM(**flags)
    use_one_thread_for_a_small_model(llm)
    return llm


def use_one_thread_for_a_small_model(llm: LLM) -> None:
    """Use one CPU thread for a small model, and with several ranks a rank's share of the cores, unless
    OMP_NUM_THREADS is set. A command owns its process, so it may change this setting."""
    from diptych.shared.engine.processes.start import on_every_rank

    if "OMP_NUM_THREADS" not in os.environ:
        on_every_rank(llm.assembly, set_num_threads)


def set_num_threads(assembly: Assembly) -> None:
    import torch

    num_parameters = sum(parameter.numel() for parameter in assembly.model.parameters())
    if num_parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    elif assembly.config.num_ranks > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // assembly.config.num_ranks, 1))
