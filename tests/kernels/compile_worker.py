"""Compiles the kernels that a launcher would launch, for a GPU that is not present.

Run as its own process with TRITON_INTERPRET=0. Each line of standard input names a GPU and a launch of
`launches.py`, in JSON. The answer is one line: what was asked, and the kernels it launched, with their shared
memory in bytes, the number of their asynchronous copies, the layouts of their `mma.sync` and the bytes for
which a thread has no registers, or the error.

The launchers run unchanged, on tensors of the device "meta". Triton gets a driver that names the target and
cannot launch, so each launch ends after compilation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import traceback
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diptych.optimized.kernels import carveout, portable
from diptych.optimized.kernels.portable import Gpu

KB = 1024
GPUS = {
    "sm_80": Gpu((8, 0), 108, 163 * KB),  # A100
    "sm_86": Gpu((8, 6), 82, 99 * KB),  # RTX 3090
    "sm_89": Gpu((8, 9), 128, 99 * KB),  # RTX 4090, L4, L40S
    "sm_90": Gpu((9, 0), 132, 227 * KB),  # H100, H200
    "sm_100": Gpu((10, 0), 148, 227 * KB),  # B200
    "sm_120": Gpu((12, 0), 170, 99 * KB),  # RTX 5090
}
"""The shared memory of a CTA, from the CUDA programming guide's table of compute capabilities."""


class NoDriver:
    """The target of one GPU, for compilation alone."""

    name = "sm_90"

    def get_current_device(self) -> str:
        return self.name  # Triton keeps the kernels of each device apart

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)


Launched = tuple[str, int, int, list[str], int]


def watch() -> list[Launched]:
    """(name, shared memory, asynchronous copies, layouts of mma.sync, bytes a thread spills) of each kernel
    launched from now on."""
    launched: list[Launched] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        text = kernel.asm["ttgir"]
        num_copies = text.count("ttg.async_copy_global_to_local")
        facts = num_copies, mma_layouts(text), spilled_bytes(kernel.asm["cubin"])
        launched.append((kernel.metadata.name, kernel.metadata.shared, *facts))
        return kernel

    JITFunction.run = compile_only
    return launched


def spilled_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found is not None, text
    return int(found.group(1))


def mma_layouts(text: str) -> list[str]:
    """The definitions of the layouts in which a kernel in Triton's GPU dialect has operands of `mma.sync`."""
    calls = [line for line in text.splitlines() if "mma.sync" in line]
    used = {layout for line in calls for layout in re.findall(r"tensor<[^,>]*, (.*?)>(?:[,) ]|$)", line)}
    definitions = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", text, re.MULTILINE))
    return sorted(definitions.get(layout, layout) for layout in used)


def main() -> None:
    no_driver = NoDriver()
    driver.set_active(no_driver)
    # Before other modules import them.
    portable.gpu_of = lambda device: GPUS[no_driver.name]
    carveout.prefer_l1 = lambda launched, num_ctas=0: None
    from tests.kernels.launches import LAUNCHES, clear_caches

    launched = watch()
    for line in sys.stdin:
        gpu, name = json.loads(line)
        launched.clear()
        no_driver.name = gpu
        clear_caches()
        try:
            with torch.device("meta"):
                LAUNCHES[name]()
            answer: Any = {"launched": launched}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer | {"asked": [gpu, name]}), flush=True)


if __name__ == "__main__":
    main()
