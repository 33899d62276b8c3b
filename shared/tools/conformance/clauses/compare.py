"""Comparisons that report where two results differ: exact for discrete values, by the tolerance table for
floats."""

from __future__ import annotations

import math
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.tolerance import Tolerance


class Mismatch(AssertionError):
    """An implementation violates its contract. `expected` and `actual` are text for people."""

    def __init__(self, what: str, expected: object = None, actual: object = None) -> None:
        self.what = what
        self.expected = expected
        self.actual = actual
        super().__init__(f"{what}: expected {_show(expected)}, got {_show(actual)}")


def expect_equal(what: str, actual: Any, expected: Any) -> None:
    """Exact equality: token ids, indices, orders, sizes. Tensors also in shape and dtype."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
            raise Mismatch(f"{what}, shape", tuple(expected.shape), getattr(actual, "shape", type(actual)))
        if actual.dtype != expected.dtype:
            raise Mismatch(f"{what}, dtype", expected.dtype, actual.dtype)
        actual, expected = actual.cpu(), expected.cpu()
        wrong = (actual != expected).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise Mismatch(f"{what} at {list(index)}", expected[index].item(), actual[index].item())
    elif actual != expected:
        raise Mismatch(what, expected, actual)


def expect_form(
    what: str, actual: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Shape, dtype (of `like`, or the one given) and device."""
    wanted = (tuple(like.shape), dtype or like.dtype, like.device)
    expect_equal(f"{what}, form", (tuple(actual.shape), actual.dtype, actual.device), wanted)


def expect_true(what: str, holds: bool, actual: object = None) -> None:
    if not holds:
        raise Mismatch(what, True, actual if actual is not None else False)


def expect_raises(what: str, error: type[BaseException], call: Any, *args: Any) -> None:
    """Check that the call raises the error that the contract promises (this type or a subclass)."""
    try:
        result = call(*args)
    except error:
        return
    except Exception as other:
        raise Mismatch(what, error.__name__, f"{type(other).__name__}: {other}") from None
    raise Mismatch(what, error.__name__, result)


def expect_close(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> None:
    """Elementwise |actual - expected| <= atol + rtol * |expected|, no NaN that is not expected, and the
    root-mean-square error below `rms` of the expected root mean square: so a few elements may be at the
    limit, but not all. Elements below the normal numbers of their type may in addition be rounded once, which
    there is not relative to their size. Computed in float64."""
    if actual.shape != expected.shape:
        raise Mismatch(f"{what}, shape", tuple(expected.shape), tuple(actual.shape))
    a, e = actual.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)
    if not bool(((a - e).abs() <= tolerance.allowed(e)).all()):
        _raise_largest(what, a, e, tolerance)
    finite = torch.isfinite(e)
    if finite.any() and (ratio := error_rms(a, e)) > tolerance.rms:
        limit = tolerance.rms + rounding_below_normals(e, actual.dtype)
        if not ratio <= limit:
            raise Mismatch(f"{what}, root-mean-square error ratio", f"<= {limit:g}", ratio)


def _raise_largest(what: str, a: torch.Tensor, e: torch.Tensor, tolerance: Tolerance) -> None:
    """Raises for the element with the largest error beyond the tolerance: equal infinities, and NaN that is
    expected, are right."""
    both_infinite = (a == e) & torch.isinf(e)
    error = torch.where(both_infinite, 0.0, (a - e).abs())
    wrong = ~(error <= tolerance.allowed(e)) & ~both_infinite
    wrong &= ~(torch.isnan(a) & torch.isnan(e))
    if wrong.any():
        flat = torch.where(torch.isnan(error), torch.inf, error)
        index = divmod_index(int(torch.where(wrong, flat, -1.0).argmax()), e.shape)
        raise Mismatch(
            f"{what} at {list(index)} ({int(wrong.sum())} of {e.numel()} beyond {tolerance})",
            e[index].item(),
            a[index].item(),
        )


def error_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ over the finite expected elements, in float64. If all expected
    elements are zero: ‖actual‖."""
    a, e = actual.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)
    norm = float(torch.linalg.vector_norm(e))
    if not math.isfinite(norm):
        finite = torch.isfinite(e)
        a, e = a[finite], e[finite]
        norm = float(torch.linalg.vector_norm(e))
    error = float(torch.linalg.vector_norm(a - e))
    return error / norm if norm > 0 else error


def rounding_below_normals(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """The `error_rms` of one rounding to the type, of the elements below its normal numbers alone."""
    if not dtype.is_floating_point:
        return 0.0
    is_small = expected.abs() < torch.finfo(dtype).smallest_normal
    return error_rms(torch.where(is_small, expected.to(dtype).to(expected.dtype), expected), expected)


def divmod_index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of element number `flat` of a tensor of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
