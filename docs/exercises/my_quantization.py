"""Stage 14, low precision: complete the functions that raise NotImplementedError.

cp docs/exercises/my_quantization.py my_quantization.py
diptych check --stage 14 my_quantization.py

The contract is in shared/interfaces/quantization.py, and the forms of a weight are in
shared/types/quant_scheme.py. The layer has `scheme`, `weight`, `weight_scale`, and by scheme `weight_zero`
and `input_scale`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.reference.layers import Linear
from diptych.shared.interfaces import quantization as interface
from diptych.shared.types.quant_scheme import INT4_ZERO, QuantScheme

FP8_MAX = 448.0
INT8_STEPS = 127.5  # half of the range from -128 to 127


class QuantizedLinear(interface.QuantizedLinear):
    def dequantized_weight(self) -> torch.Tensor:
        """float32 [out_features, in_features]: (q - zero) * scale.

        weight_scale [out_features, groups] has a column for each `scheme.group_size` inputs, or one for all;
        the last group may be smaller. int4: byte j of a group has input j in its low half and input
        j + group / 2 in its high half; the zero point is INT4_ZERO or weight_zero."""
        raise NotImplementedError("TODO weight: q minus zero point, times the scale of its group")

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] rounded to 8 bits and back, float32; x itself where scheme.inputs is
        "none". The scale is `input_scale`, or computed for each token ("token") or for each `group_size`
        inputs of a token ("group"): the largest magnitude over FP8_MAX or INT8_STEPS. With `self.tp`, that of
        a token is the largest of all ranks: `self.tp.all_gather`."""
        raise NotImplementedError("TODO inputs: a scale for each token or group, round, times the scale")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features] of the same dtype."""
        raise NotImplementedError("TODO layer: both of the above, multiplied in float32, and the bias")


def quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module | None:
    """What a model has in place of a linear layer whose weight is quantized; None for any other module."""
    if not isinstance(module, Linear):
        return None
    out_features, in_features = module.weight.shape
    return QuantizedLinear(in_features, out_features, scheme, module.bias is not None)
