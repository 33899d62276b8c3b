"""Copies of the optimized sampler with a few words of its source changed: bugs to be caught, or ways that are
seldom taken made the only ones. Kernels are compiled from source, so that is where they are changed."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import zlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from diptych.shared.interfaces import sampler as contract
from diptych.shared.types import SampleOutput, SamplingBatchInfo

OPTIMIZED = Path(__file__).parents[2] / "optimized"
_FOLDER = tempfile.TemporaryDirectory(prefix="sampler_variants_")


class Change(NamedTuple):
    """In sampler.py (file "") or kernels/sampling/sampling_`file`.py: `old` occurs there once."""

    file: str
    old: str
    new: str


@cache
def variant(*changes: Change) -> ModuleType:
    """The package of a changed sampler: its modules sampler, sampling_pick, ..."""
    name = f"sampler_variant_{zlib.crc32(repr(changes).encode()):08x}"
    folder = Path(_FOLDER.name) / name
    folder.mkdir()
    for path in (OPTIMIZED / "sampler.py", *sorted(OPTIMIZED.glob("kernels/sampling/sampling_*.py"))):
        text = path.read_text("utf-8")
        for change in changes:
            if path.stem == (f"sampling_{change.file}" if change.file else "sampler"):
                found = text.count(change.old)
                assert found == 1, f"{path.name} has {change.old!r} {found} times"
                text = text.replace(change.old, change.new)
        (folder / path.name).write_text(
            text.replace("diptych.optimized.kernels.sampling.sampling_", f"{name}.sampling_"), "utf-8"
        )
    (folder / "__init__.py").write_text(
        "import diptych.optimized.kernels  # what the interpreter needs", "utf-8"
    )
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{name}.sampler")
    return package


class Variant(contract.Sampler):
    """The optimized sampler with `changes`, made when it is first asked."""

    changes: tuple[Change, ...] = ()

    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        return variant(*self.changes).sampler.Sampler().sample(logits, info, positions)
