"""FlashInfer's modules of attention kernels: which are there, and how missing ones are compiled.

nvcc takes minutes for a module. `build_in_background` compiles in a process of low priority that outlives the
engine, so that a build is not interrupted; if it is, ninja goes on with the files that are missing. Modules
of the package flashinfer-jit-cache count as compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from diptych.shared.engine.kernel_cache import flashinfer_folder


class Module(NamedTuple):
    """What a module of FlashInfer is compiled for."""

    kernels: str  # decode, fa2, fa3
    q_dtype: str  # names of torch's types
    kv_dtype: str
    head_dim: int
    has_window: bool
    has_cap: bool

    @property
    def spec(self) -> Any:
        """FlashInfer's description, a `JitSpec`."""
        from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

        _use_unpacked()
        q_dtype, kv_dtype = getattr(torch, self.q_dtype), getattr(torch, self.kv_dtype)
        types = q_dtype, kv_dtype, q_dtype, torch.int32
        variant = self.head_dim, self.head_dim, 0, self.has_window, self.has_cap
        if self.kernels == "decode":
            return gen_batch_decode_module(*types, *variant)
        return gen_batch_prefill_module(self.kernels, *types, *variant, False)

    @property
    def is_built(self) -> bool:
        """Whether FlashInfer loads it without compiling: it is there, and no older than its sources."""
        spec = self.spec
        if spec.is_aot or not spec.is_compiled:
            return bool(spec.is_compiled)
        spec.write_ninja()
        command = ["ninja", "-n", "-C", str(spec.build_dir), "-f", str(spec.ninja_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return "no work to do" in done.stdout


@cache
def _use_unpacked() -> None:
    """Modules of a `kernel_cache` take the place of those of flashinfer-jit-cache, if that is not
    installed."""
    if importlib.util.find_spec("flashinfer_jit_cache") is None and flashinfer_folder().is_dir():
        from flashinfer.jit import env

        env.FLASHINFER_AOT_DIR = flashinfer_folder()


@cache
def announce(module: Module) -> None:
    """Print a message before this process compiles a module, because it waits for minutes."""
    if not module.is_built:
        print(
            f"FlashInfer compiles {module.spec.name}: once, for minutes ({os.cpu_count()} cores) ...",
            file=sys.stderr,
            flush=True,
        )


def build_in_background(modules: Sequence[Module]) -> None:
    """Start a process that compiles modules one after the other. It uses half of the cores, and no GPU."""
    from flashinfer.jit.core import current_compilation_context

    architectures = " ".join(
        f"{major}.{minor}" for major, minor in sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    )
    settings = {
        "FLASHINFER_CUDA_ARCH_LIST": architectures,
        "CUDA_VISIBLE_DEVICES": "",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(max((os.cpu_count() or 1) // 2, 1))),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(modules)],
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it goes on if this process ends, also by Ctrl-C
    )
    names = ", ".join(module.spec.name for module in modules)
    print(
        f"FlashInfer's {names} is not compiled: Triton computes attention. Process {process.pid} compiles it "
        "for some minutes, at low priority, and the next start uses it.",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """The process of `build_in_background`. FlashInfer's lock makes it wait for another one that compiles the
    same module."""
    os.nice(19)
    for fields in json.loads(sys.argv[1]):
        Module(*fields).spec.build(verbose=False)


if __name__ == "__main__":
    main()
