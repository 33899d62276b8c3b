"""Stage 14, low precision: complete the functions that raise NotImplementedError.

diptych course grade 14     # in the folder of `diptych course start`
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
        """The weight that q, zero point and scale stand for, float32 [out_features, in_features].

        weight_scale [out_features, groups] has a column for each `scheme.group_size` inputs, or one for all;
        the last group may be smaller. int4 (`scheme.is_packed`): byte j of a group has input j in its low
        half and input j + group / 2 in its high half; the zero point is INT4_ZERO or weight_zero."""
        raise NotImplementedError("TODO weight: from q and its scale to numbers")

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] as its 8-bit values say, float32; x itself if scheme.inputs is "none".
        Values that share a scale: all ("static": `input_scale`), those of a token ("token"), or `group_size`
        successive ones of a token ("group"; the last group may be smaller)."""
        raise NotImplementedError("TODO inputs: divide by the scale, round, and back")

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        """The dynamic scale of groups [num_tokens, number of groups, group size] -> [..., 1], float32, not 0.
        FP8_MAX and INT8_STEPS are what the largest magnitude becomes. `self.tp`: ranks that have other parts
        of the same tokens (`all_gather`), for inputs "token"."""
        raise NotImplementedError("TODO inputs: what is a step of this group?")

    def _rounded(self, q: torch.Tensor) -> torch.Tensor:
        """float32 -> the nearest values of the 8-bit type (`scheme.weight_type`), as float32."""
        raise NotImplementedError("TODO inputs: the nearest value that there is")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features] of the same dtype."""
        raise NotImplementedError("TODO layer: the product, in which precision?")


def quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module | None:
    """What a model has in place of a linear layer whose weight is quantized; None for any other module."""
    if not isinstance(module, Linear):
        return None
    out_features, in_features = module.weight.shape
    return QuantizedLinear(in_features, out_features, scheme, module.bias is not None)
