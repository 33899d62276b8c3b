"""`diptych warm`: compiles all kernels of a model on this GPU into one file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.options import EngineOptions, spread


@spread
def warm(
    *,
    engine: EngineOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("kernels.tar"),
) -> None:
    """Compile the kernels that an engine of these flags needs, FlashInfer's modules included, and write them
    to a file for --kernel-cache. Weights are not read: only config.json is needed."""
    bench_run.check_files(None, output)
    import torch

    from diptych.shared.engine import kernel_cache
    from diptych.shared.tools.bench.startup import CACHES, start_engine

    if not torch.cuda.is_available():
        raise ValueError("warm needs a CUDA GPU: kernels are compiled for one")
    flags = {"load_format": "dummy", **engine.to_flags()}
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder)
        # Without FlashInfer's modules, then with them: Triton's attention kernels differ.
        for what in ("Triton's kernels, FlashInfer's modules", "kernels beside FlashInfer's modules"):
            print(f"compiling {what} ...", flush=True)
            start = start_engine(what, flags, caches, builds_modules=True)
            print(f"  {start.num_compiled(False)} kernels, {start.total:.0f} s")
        modules = caches / CACHES["FLASHINFER_WORKSPACE_BASE"]
        made_for = kernel_cache.manifest()
        num = kernel_cache.pack(output, caches / CACHES["TRITON_CACHE_DIR"], modules, made_for)
    print(f"{output}: {num} kernels and modules for {made_for['gpu']}, torch {made_for['torch']}")
