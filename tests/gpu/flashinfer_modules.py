"""FlashInfer's modules that tests on a GPU use, and their compilation before the tests.

    python -m tests.gpu.flashinfer_modules         # what `make test-gpu` compiles beside its tests
    python -m tests.gpu.flashinfer_modules --all   # what all tests use

A module of FlashAttention 3 takes two minutes on 16 cores, and the experts of `flashinfer_cutlass` more. So a
session compiles one of each kind, and deselects tests that need another one, unless it is compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import torch

from diptych.shared.tools.conformance.oracles.attention_batches import AttentionCase
from diptych.shared.types import ForwardMode
from diptych.shared.types.attention import FP8

BF16, FP16 = torch.bfloat16, torch.float16
CUDA_CORE_GROUP_SIZES = (1, 2)


class Module(NamedTuple):
    """`kernels`: decode, fa2, fa3 or experts."""

    kernels: str
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    head_dim: int = 64
    has_window: bool = False
    has_cap: bool = False

    @property
    def variant(self) -> tuple[Any, ...]:
        """Arguments of FlashInfer's functions for the module."""
        types = self.dtype, self.kv_dtype, self.dtype, torch.int32
        kind = self.head_dim, self.head_dim, 0, self.has_window, self.has_cap
        return (*types, *kind) if self.kernels == "decode" else (self.kernels, *types, *kind, False)

    def name(self) -> str:
        from flashinfer.jit import get_batch_decode_uri, get_batch_prefill_uri

        if self.kernels == "experts":
            return "fused_moe_90"
        name_of = get_batch_decode_uri if self.kernels == "decode" else get_batch_prefill_uri
        return str(name_of(*self.variant))

    def spec(self) -> Any:
        """FlashInfer's description of the module, which writes its source."""
        from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

        if self.kernels == "experts":
            from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

            return gen_cutlass_fused_moe_sm90_module()
        make = gen_batch_decode_module if self.kernels == "decode" else gen_batch_prefill_module
        return make(*self.variant)

    @property
    def is_compiled(self) -> bool:
        if importlib.util.find_spec("flashinfer") is None:
            return False
        from flashinfer.jit import env

        name = self.name()
        return any(
            (folder / name / f"{name}.so").exists()
            for folder in (env.FLASHINFER_JIT_DIR, env.FLASHINFER_AOT_DIR)
        )


EXPERTS = Module("experts")
BUILT = (
    Module("fa3"),
    *(Module(kernels, has_window=True) for kernels in ("fa2", "decode")),
    *(Module(kernels) for kernels in ("fa2", "decode")),
    *(Module(kernels, has_cap=True) for kernels in ("fa2", "decode")),
    *(Module(kernels, kv_dtype=FP8) for kernels in ("fa2", "decode")),
    *(Module(kernels, FP16, FP16) for kernels in ("fa2", "decode")),
)
"""What a session compiles: of each kind of kernels and each feature one. The slowest first."""


def modules_of(choice: str, clause: str, case: Any) -> set[Module]:
    """The modules that a case of a contract may need on a Hopper GPU, with an attention backend of that
    name; none, where the backend refuses the case. `optimized` uses FA3 for prompts. Clauses of several steps
    decode too."""
    if choice == "optimized":
        return {module for module in modules_of("fa3", clause, case) if module.kernels == "fa3"}
    batch = getattr(case, "batch", case)
    dtype, kernels = getattr(batch, "dtype", None), {choice.replace("flashinfer", "fa2")}
    if dtype not in (BF16, FP16):
        return set()
    if not isinstance(batch, AttentionCase):  # the chunks of a prompt
        return {Module(each, dtype, dtype) for each in (*kernels, "decode")}
    kv_dtype = dtype if batch.kv_scales is None else FP8
    is_refused = batch.head_dim not in (64, 128, 256) or bool(batch.sinks) or batch.attention_chunk > 0
    if is_refused or (choice == "fa3" and kv_dtype is FP8):
        return set()
    if batch.mask != "causal":
        kernels = kernels | {"fa2"} if clause == "chain-is-causal" else {"fa2"}
    elif clause == "plans-follow-one-another":
        kernels = kernels | {"decode"}
    elif batch.forward_mode is ForwardMode.DECODE:
        on_cuda_cores = batch.num_qo_heads // batch.num_kv_heads in CUDA_CORE_GROUP_SIZES
        kernels = {"decode" if on_cuda_cores else "fa2"}
    has_window, has_cap = batch.sliding_window >= 0, batch.logit_cap > 0
    kinds = product((False, True), repeat=2) if clause == "kinds-of-one-plan" else [(has_window, has_cap)]
    return {Module(each, dtype, kv_dtype, batch.head_dim, *kind) for kind in kinds for each in kernels}


def missing(modules: Iterable[Module]) -> bool:
    """Whether one of the modules is neither built by a session nor compiled before."""
    return any(module not in BUILT and not _is_compiled(module) for module in modules)


_known: dict[Module, bool] = {}


def _is_compiled(module: Module) -> bool:
    if module not in _known:
        _known[module] = module.is_compiled
    return _known[module]


def build(modules: Iterable[Module]) -> Iterator[str]:
    """Compile what is not compiled, several modules at a time; a line for each."""
    os.environ.setdefault("MAX_JOBS", str(max(2, (os.cpu_count() or 2) * 5 // 8)))  # of each module

    def compiled(module: Module) -> str:
        start, spec = time.monotonic(), module.spec()
        if not spec.is_compiled:
            spec.build(verbose=False)
        return f"{time.monotonic() - start:6.1f} s  {spec.name}"

    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(compiled, modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="what all tests use")
    modules = list(BUILT)
    if parser.parse_args().all:
        from tests.conformance.test_contracts import cases

        wanted = {EXPERTS}
        for each in cases():
            component, choice, clause, case = each.values
            if component == "attention" and choice in ("flashinfer", "fa3"):
                wanted |= modules_of(choice, clause.name, case)  # with those of `optimized`
        modules += sorted(wanted - set(BUILT), key=str)
    for line in build(modules):
        print(line, flush=True)


if __name__ == "__main__":
    main()
