"""How close two results inside a running model must be, given their rounding and the error of their
inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.shared.tools.conformance.clauses.compare import divmod_index
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, Tolerance, tolerance

ROWS = {
    "norm": "norm",
    "elementwise": "elementwise",
    "rotary": "rotary",
    "attention": "attention",
    "linear attention": "linear attention",
    # One GEMM rounds less than two GEMMs with a rounding between them. A layer is at least two GEMMs.
    "linear": "moe",
    "mlp": "moe",
    "layer": "moe",
    "logits": "logits",
}
"""kind of op -> row of the table of tolerances"""

GROWTH = 3.0
"""An op may hand on this many times the error that earlier ops had: the largest growth measured on the
built-in models, beyond what an op's own row covers, was 2.9 (bfloat16, a chunked and paged run against a
plain one)."""

PEAK = 5.0
"""A single element may err by so many times the root mean square: of normal errors, one in a million does."""

PEAK_OF_PRODUCTS = 12.0
"""The same for the error of silu(gate) * up: it is the one's error times the other, and of products of two
normal variables one in a million is that large."""

INSIDE = 2.0
"""What is inside a model may be so many times worse than its logits: what an MLP adds may be small, of terms
that cancel, or so large that it hides the rest until the last norm divides it away. The worst measured was
1.2 times the row for a whole model (tiny-moe, bfloat16, the optimized panel in Triton's interpreter)."""

_TINY = 1e-300  # avoids a division by zero in elements that are masked


@dataclass(frozen=True)
class RowError:
    """The first row of two [n, ...] tensors that are not close, and its worst element."""

    row: int
    index: tuple[int, ...]  # within the row
    a: float
    b: float
    ratio: float  # ‖a - b‖ / ‖a‖ of the row
    allowed: float  # the limit of `error`
    num_beyond: int  # elements of the row that are beyond their limit
    num_elements: int

    @property
    def error(self) -> float:
        return abs(self.a - self.b)


def allowed_between(kind: str, dtype: torch.dtype, inherited: float) -> Tolerance:
    """The tolerance of an op's results when its inputs differ by `inherited` (relative, root mean square).

    The rows of the table are for exact inputs of unit variance. So `atol` is in units of a row's root mean
    square here, and all three bounds grow with `inherited`. The root-mean-square bound stays at or below
    `INSIDE` times that of a whole model, the row "logits".
    """
    if kind in ("ids", "experts", "embedding"):
        return EXACT
    own = tolerance(ROWS[kind], dtype)
    if kind == "logits":
        return own
    grown = GROWTH * inherited
    largest = INSIDE * tolerance("logits", dtype).rms
    return Tolerance(
        atol=own.atol + (PEAK_OF_PRODUCTS if kind == "elementwise" else PEAK) * grown,
        rtol=own.rtol + grown,
        rms=max(own.rms, min(own.rms + grown, largest)),
        reason=f"{own.reason}; earlier ops differ by up to {inherited:.1e}",
    )


def compare_rows(a: torch.Tensor, b: torch.Tensor, limit: Tolerance) -> tuple[torch.Tensor, RowError | None]:
    """[n, ...] twice, on the CPU -> ‖a - b‖ / ‖a‖ of each row, float64 [n], and the first row that exceeds
    the limit in an element or as a whole; None: all are close. In float64. Equal infinities and equal NaNs
    count as no error; one on a single side counts as an infinite error. A row of one number, in which large
    terms may have cancelled, is measured by the root mean square of its column."""
    if torch.equal(a, b):
        return torch.zeros(a.shape[0], dtype=torch.float64), None
    error, expected = _errors(a, b)
    norms = torch.linalg.vector_norm(expected, dim=1)
    if expected.shape[1] == 1:
        norms = norms.square().mean().sqrt().expand_as(norms)
    distances = torch.linalg.vector_norm(error, dim=1)
    ratios = torch.where(norms > 0, distances / norms.clamp(min=_TINY), distances)
    scale = norms[:, None] / expected.shape[1] ** 0.5
    limits = limit.atol * scale + limit.rtol * expected.abs()
    beyond = error > limits
    is_bad = beyond.any(dim=1) | (ratios > limit.rms)
    if not is_bad.any():
        return ratios, None
    row = int(is_bad.nonzero()[0])
    excess = torch.where(error[row] > 0, error[row] / limits[row].clamp(min=_TINY), 0.0)
    worst = int(excess.argmax())
    return ratios, RowError(
        row=row,
        index=divmod_index(worst, a.shape[1:]),
        a=float(a[row].flatten()[worst]),
        b=float(b[row].flatten()[worst]),
        ratio=float(ratios[row]),
        allowed=float(limits[row, worst]),
        num_beyond=int(beyond[row].sum()),
        num_elements=error.shape[1],
    )


def error_ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖a‖ of one row."""
    return float(compare_rows(a[None], b[None], EXACT)[0])


def _errors(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n, elements]: |a - b|, and a with zeros in place of values that are not finite."""
    a, b = (x.reshape(x.shape[0], -1).to(torch.float64) for x in (a, b))
    error = (a - b).abs()
    if torch.isfinite(error).all():
        return error, a
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    error = torch.nan_to_num(torch.where(same, 0.0, error), nan=torch.inf)
    return error, torch.where(torch.isfinite(a), a, 0.0)
