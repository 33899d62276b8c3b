"""`diptych tune`: measures the kernels of some models on this GPU and writes its table (`gpu_table`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import triton

from diptych.optimized.kernels import gpu_table
from diptych.optimized.tune import linear_tune, moe_tune, quantized_tune
from diptych.shared.config import ModelConfig
from diptych.shared.types.quant_scheme import QuantScheme


def tune(
    configs: Sequence[ModelConfig],
    all_tokens: Sequence[int] | None = None,
    schemes: Sequence[QuantScheme] = (),
) -> Path:
    """Measures linear layers of few tokens and tiles of experts, or the linear layers with weights of these
    schemes. Writes the file after each measurement, so an interrupt keeps what was measured.
    `all_tokens`: numbers of tokens; None: the usual ones."""
    gpu = torch.cuda.get_device_name()
    table = replace(gpu_table.read(gpu), torch=torch.__version__, triton=triton.__version__)
    linear_shapes = [shape for config in configs for shape in linear_tune.shapes_of(config)]
    if schemes:
        sizes = sorted(all_tokens or quantized_tune.TOKENS)
        layers = [shape for config in configs for shape in linear_tune.decoder_shapes_of(config)]
        for scheme, layer in itertools.product(schemes, dict.fromkeys(layers)):
            for measured in quantized_tune.tune(table, scheme, layer, sizes):
                table = measured
                gpu_table.write(table)
        return gpu_table.path_of(gpu)
    few = [size for size in all_tokens or linear_tune.TOKENS if size <= linear_tune.TOKENS[-1]]
    for linear_shape in dict.fromkeys(linear_shapes):
        for measured in linear_tune.tune(table, linear_shape, sorted(few)):
            table = measured
            gpu_table.write(table)
    shapes = [shape for config in configs if (shape := moe_tune.shape_of(config)) is not None]
    for shape in dict.fromkeys(shapes):
        for measured in moe_tune.tune(table, shape, sorted(all_tokens or moe_tune.TOKENS)):
            table = measured
            gpu_table.write(table)
    return gpu_table.path_of(gpu)
