"""The table of tolerances. Every row says where its numbers come from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Tolerance:
    """`atol` and `rtol` bound each element, `rms` the error's norm over the expected norm, `row` that of each
    row; None: it follows from `rms`."""

    atol: float
    rtol: float
    rms: float
    reason: str
    row: float | None = field(default=None, kw_only=True)

    def allowed(self, expected: torch.Tensor) -> torch.Tensor:
        """The largest error of each element."""
        return self.atol + self.rtol * expected.abs()

    def __str__(self) -> str:
        return f"atol {self.atol:g}, rtol {self.rtol:g}"


EXACT = Tolerance(0.0, 0.0, 0.0, "copies, indices and ids: nothing is computed")

_EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

_ELEMENTWISE = "a few float32 operations and one rounding to the output's type: two units in the last place"
_SUM = (
    "inputs exact, products summed in float32 in any order (error grows like sqrt(n) eps32), one rounding to "
    "the output's type; the absolute part covers sums that cancel, for inputs of unit variance"
)
_ROTARY = (
    "an angle is a float32 product of position and frequency, and a frequency a power that libraries round "
    "differently by an ulp: up to 1000 * 2^-23 radians at position 1000 (a hundred times that far out at "
    "100,000), times elements of up to 4; then one rounding to the type"
)
_SOFTMAX = (
    "exp amplifies a score's rounding: scores of magnitude up to 10 in float32 are off by 1e-6, and so are "
    "weights relatively; half types round the probabilities before the second GEMM (one more unit)"
)
_RECURRENCE = (
    "a state in float32 takes one rounded update a token, each of them contracting (|k| = 1, beta and exp(g) "
    "at most 1), so errors do not grow; a convolution and norms of few roundings before it; one rounding of "
    "the output to its type"
)
_GEMM_CHAIN = (
    "two GEMMs with a rounding to the type between them; each rounds its output once and the "
    "second sums the first's roundings"
)
_QUANTIZED_CHAIN = (
    "two GEMMs with a rounding to 8 bits between them: where a value lies between two of 8 bits, sums in "
    "another order may round it to the other one, a sixteenth of the value away"
)
_SPLIT_CHAIN = (
    "the same values of 8 bits on both sides, so only sums in another order differ: tensor cores of FP8 keep "
    "about 14 bits of a sum, and on a GPU 68 of 1,152 values were 1.4e-4 apart"
)
_FP8_SUM = (
    "FP8 tensor cores of Hopper keep about 14 bits of a sum of 128 products; for many tokens the weight "
    "is dequantized with a rounding to the type; one rounding of the output"
)
_RANKS = (
    "each addition of ranks may round to the type, half a unit in the last place of partial sums of up to 4; "
    "sums of ranks may cancel"
)

TABLE: dict[str, dict[torch.dtype, Tolerance]] = {
    "elementwise": {
        torch.float32: Tolerance(1e-6, 4 * _EPS[torch.float32], 1e-6, _ELEMENTWISE),
        torch.float16: Tolerance(1e-6, 2 * _EPS[torch.float16], 1e-3, _ELEMENTWISE),
        torch.bfloat16: Tolerance(1e-6, 2 * _EPS[torch.bfloat16], 8e-3, _ELEMENTWISE),
    },
    "norm": {
        torch.float32: Tolerance(1e-6, 1e-5, 1e-6, _SUM),
        # The normalised value is rounded, and again after the multiplication by the weight.
        torch.float16: Tolerance(1e-5, 3 * _EPS[torch.float16], 2e-3, _ELEMENTWISE),
        torch.bfloat16: Tolerance(1e-5, 3 * _EPS[torch.bfloat16], 1.5e-2, _ELEMENTWISE),
    },
    "rotary": {
        torch.float32: Tolerance(5e-4, 0.0, 5e-5, _ROTARY),
        torch.float16: Tolerance(5e-4, 2 * _EPS[torch.float16], 1e-3, _ROTARY),
        torch.bfloat16: Tolerance(5e-4, 2 * _EPS[torch.bfloat16], 8e-3, _ROTARY),
    },
    "rotary, far": {
        torch.float32: Tolerance(1e-1, 0.0, 1e-2, _ROTARY),
    },
    "attention": {
        torch.float32: Tolerance(5e-6, 2e-5, 5e-6, _SOFTMAX),
        torch.float16: Tolerance(2e-3, 4 * _EPS[torch.float16], 3e-3, _SOFTMAX),
        torch.bfloat16: Tolerance(1.6e-2, 4 * _EPS[torch.bfloat16], 2e-2, _SOFTMAX),
    },
    "linear attention": {
        torch.float32: Tolerance(1e-5, 2e-5, 5e-6, _RECURRENCE),
        torch.float16: Tolerance(2e-3, 2 * _EPS[torch.float16], 2e-3, _RECURRENCE),
        torch.bfloat16: Tolerance(8e-3, 2 * _EPS[torch.bfloat16], 1e-2, _RECURRENCE),
    },
    "softmax": {
        torch.float32: Tolerance(1e-9, 4e-6, 2e-6, _SOFTMAX),
    },
    "moe": {
        torch.float32: Tolerance(1e-5, 1e-4, 1e-5, _GEMM_CHAIN),
        torch.float16: Tolerance(5e-3, 1e-2, 5e-3, _GEMM_CHAIN),
        torch.bfloat16: Tolerance(4e-2, 6e-2, 2e-2, _GEMM_CHAIN),
    },
    "gemm": {
        torch.float32: Tolerance(1e-5, 1e-5, 2e-6, _SUM),
        torch.float16: Tolerance(2e-3, 2 * _EPS[torch.float16], 1e-3, _SUM),
        torch.bfloat16: Tolerance(8e-3, 2 * _EPS[torch.bfloat16], 8e-3, _SUM),
    },
    "quantized linear": {
        torch.float32: Tolerance(1e-5, 1e-5, 1e-6, _SUM),
        torch.float16: Tolerance(4e-3, 4 * _EPS[torch.float16], 2e-3, _FP8_SUM),
        torch.bfloat16: Tolerance(1.6e-2, 2 * _EPS[torch.bfloat16], 8e-3, _FP8_SUM),
    },
    "quantized moe": {
        torch.float32: Tolerance(4e-2, 2e-2, 5e-3, _QUANTIZED_CHAIN),
        torch.float16: Tolerance(2e-2, 2e-2, 1e-2, _QUANTIZED_CHAIN),
        torch.bfloat16: Tolerance(4e-2, 6e-2, 2e-2, _QUANTIZED_CHAIN),
    },
    "quantized moe of ranks": {
        torch.float32: Tolerance(1e-3, 1e-3, 5e-4, _SPLIT_CHAIN),
        torch.float16: Tolerance(2e-2, 2e-2, 1e-2, _QUANTIZED_CHAIN),
        torch.bfloat16: Tolerance(4e-2, 6e-2, 2e-2, _QUANTIZED_CHAIN),
    },
    "logits": {
        torch.float32: Tolerance(
            2e-4, 2e-4, 1e-4, "a whole model of few layers in float32, sums in another order"
        ),
        torch.float16: Tolerance(5e-2, 5e-2, 2e-2, "a whole model; each layer rounds its output"),
        torch.bfloat16: Tolerance(3e-1, 1e-1, 6e-2, "a whole model; each layer rounds its output"),
    },
    "sum over ranks": {
        dtype: Tolerance(4 * _EPS[dtype], 2 * _EPS[dtype], 2 * _EPS[dtype], _RANKS) for dtype in _EPS
    },
    "logprobs": {
        torch.float32: Tolerance(1e-5, 1e-5, 1e-5, "log softmax in float32: the sum of exponentials rounds"),
    },
}

NEAR_TIE = {
    torch.float32: 1e-3,
    torch.float16: 6e-2,
    torch.bfloat16: 4e-1,
}
"""Top-2 gap of the logits below which two panels may choose differently: twice the absolute part of "logits",
rounded up."""


def tolerance(kind: str, dtype: torch.dtype) -> Tolerance:
    """The row for a kind of operation; float64 results use the float32 row."""
    rows = TABLE[kind]
    return rows[torch.float32 if dtype == torch.float64 else dtype]
