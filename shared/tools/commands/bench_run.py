"""Shared code of the engine benchmarks: flags, a progress bar, and the end of a run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

    from diptych.shared.timeline import Recording
    from diptych.shared.tools.bench.step_cost import Ceilings
    from diptych.shared.tools.bench.trace import Idle

_Workload = TypeVar("_Workload")

WIDTH = 120
"""The width of tables that are written to a file or a pipe."""


def check_files(plot: Path | None, *others: Path | None) -> None:
    """Check before the measurement that the result files can be written."""
    files = [file for file in (plot, *others) if file is not None]
    for i, file in enumerate(files):
        _check_file(file)
        if file.absolute() in (each.absolute() for each in files[:i]):
            raise ValueError(f"{file} is named for two results: the second would replace the first")
    if plot is not None:
        from diptych.shared.tools.bench.plots import require_matplotlib

        require_matplotlib(plot)


def _check_file(file: Path) -> None:
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"no folder {folder} for {file.name}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file in it")
    if not file.exists():
        _try_to_write(folder)
    elif not os.access(file, os.W_OK):
        raise ValueError(f"{file} exists and cannot be written")


def check_folder(folder: Path) -> None:
    """Check a folder as `check_files` does; it need not exist. It is not made, so that a failure before the
    results leaves no folder."""
    path = folder.absolute()
    _try_to_write(next(each for each in (path, *path.parents) if each.exists()))


def _try_to_write(folder: Path) -> None:
    """Write a test file: permissions do not cover read-only file systems, /proc, or root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}") from None


def with_dummy_weights(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags, with random weights if the model is a shape of shared/assets/configs."""
    from diptych.shared.loading.model_path import is_shape

    return ({"load_format": "dummy"} if is_shape(str(flags.get("model", ""))) else {}) | flags


def ceilings_of(flags: dict[str, Any]) -> Ceilings | None:
    """Measure the ceilings for the device and dtype of an engine with these flags."""
    from diptych.shared.config import EngineConfig, read_config
    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.tools.bench.ceilings import ceilings_before_engine, device_and_dtype
    from diptych.shared.tools.bench.step_cost import is_one_engine

    config = EngineConfig().updated(**flags)
    if not is_one_engine(config):
        print("no roofline bound: it is counted for one replica without pp", file=sys.stderr)
        return None
    print("measuring what the device can do", file=sys.stderr)
    model_config = read_config(resolve_model_path(config.model, config.load_format))
    return ceilings_before_engine(*device_and_dtype(flags, model_config))


class Progress:
    """Shows progress: a bar on a terminal, elsewhere one line for each run. Within the block, Ctrl-C ends the
    measurement and not the program, so that complete results are reported."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.is_interrupted = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        self.close()
        self.is_interrupted = kind is KeyboardInterrupt
        return self.is_interrupted

    def on_run(self, what: str, num_tokens: int | None = None) -> Callable[[int], None] | None:
        self.close()
        if not sys.stderr.isatty():
            print(what, file=sys.stderr)
            return None
        from tqdm import tqdm

        self.bar = bar = tqdm(total=num_tokens, desc=what, unit="tok", leave=False)
        return lambda so_far: bar.update(so_far - bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def make_workload(known: Mapping[str, type[_Workload]], name: str, numbers: dict[str, Any]) -> _Workload:
    """The workload of that name; given numbers (not None) replace its defaults."""
    if name not in known:
        raise ValueError(f"--workload must be one of {', '.join(known)}, got {name!r}")
    given = {field: value for field, value in numbers.items() if value is not None}
    own = [field.name for field in fields(known[name])]  # type: ignore[arg-type]
    foreign = [field for field in given if field not in own]
    if foreign:
        raise ValueError(
            f"{', '.join(map(option_of, foreign))} does not apply to the {name} workload, which has "
            f"{', '.join(map(option_of, own))}"
        )
    return known[name](**given)


def option_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def save_trace(file: Path | None, recording: Recording | None) -> None:
    if file is not None and recording is not None:
        from diptych.shared.tools.bench.trace import write_trace

        write_trace(file, recording)
        print(f"timeline written to {file}; open it in https://ui.perfetto.dev")


def idle_text(idle: Idle | None) -> str:
    return "" if idle is None else f"{idle.share:.1%} ({idle.num_steps} steps)"


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)
