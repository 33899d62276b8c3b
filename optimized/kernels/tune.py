"""`diptych tune`: measures the kernels of some models on this GPU and writes its table (`gpu_table`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import triton

from optimized.kernels import gemm_tune, gpu_table, moe_tune
from optimized.kernels.cublas_linear import STEP
from shared.config import ModelConfig


def tune(
    configs: Sequence[ModelConfig], all_tokens: Sequence[int] | None = None, quick: bool = False
) -> Path:
    """Measures tiles of experts, then cuBLAS's algorithms; writes the file after each measurement, so an
    interrupt keeps what was measured. `all_tokens`: numbers of tokens; None: those of each part. `quick`: of
    cuBLAS's algorithms only those that are known or proposed, and their neighbours."""
    gpu = torch.cuda.get_device_name()
    table = replace(gpu_table.read(gpu), torch=torch.__version__, triton=triton.__version__)
    shapes = [moe_tune.shape_of(config) for config in configs]
    for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
        for measured in moe_tune.tune(table, shape, sorted(all_tokens or moe_tune.TOKENS)):
            table = measured
            gpu_table.write(table)
    tokens = sorted(all_tokens or gemm_tune.TOKENS)
    gemm_tokens = [n for n in tokens if n % STEP == 0 and n >= gemm_tune.TOKENS[0]]
    for measured in gemm_tune.tune_gemms(table, configs, gemm_tokens, quick):
        gpu_table.write(measured)
    return gpu_table.path_of(gpu)
