"""`diptych tune`: measures the kernels of some models on this GPU and writes its table (`gpu_table`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import triton

from optimized.kernels import gpu_table, moe_tune
from shared.config import ModelConfig


def tune(configs: Sequence[ModelConfig], all_tokens: Sequence[int] | None = None) -> Path:
    """Measures tiles of experts; writes the file after each measurement, so an interrupt keeps what was
    measured. `all_tokens`: numbers of tokens; None: the usual ones."""
    gpu = torch.cuda.get_device_name()
    table = replace(gpu_table.read(gpu), torch=torch.__version__, triton=triton.__version__)
    shapes = [shape for config in configs if (shape := moe_tune.shape_of(config)) is not None]
    if not shapes:
        raise ValueError("none of these models has experts, and only their tiles are measured")
    for shape in dict.fromkeys(shapes):
        for measured in moe_tune.tune(table, shape, sorted(all_tokens or moe_tune.TOKENS)):
            table = measured
            gpu_table.write(table)
    return gpu_table.path_of(gpu)
