"""Triton's interpreter, made faster: operators on types they have met compute what Triton's own compute."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import triton

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled", allow_module_level=True)

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_semantic

from diptych.optimized.kernels import interpreter
from diptych.shared.tools.conformance.oracles.linear_batches import world_of
from tests.kernels.test_recurrence import case_of, run

METHODS = {
    "__add__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__and__": "and_",
    "__or__": "or_",
    "__xor__": "xor_",
    "__lt__": "less_than",
    "__le__": "less_equal",
    "__gt__": "greater_than",
    "__ge__": "greater_equal",
    "__eq__": "equal",
    "__ne__": "not_equal",
    "__radd__": "add",
    "__rmul__": "mul",
    "__lshift__": "shl",
    "__rshift__": "",  # by the sign of the left operand
}
SHAPES = [(), (4,), (2, 1), (2, 4)]
VALUES: list[tuple[Any, list[Any]]] = [
    (tl.int1, [True, False]),
    (tl.int32, [0, 1, -3, 2**31 - 1]),
    (tl.uint32, [0, 1, 2**32 - 1]),
    (tl.int64, [5, -(2**62)]),
    (tl.float16, [0.5, -0.0, 6e4, float("inf")]),
    (tl.float32, [1.5, -0.0, 0.0, float("nan"), -float("inf"), 1e38]),
    (tl.pointer_type(tl.float32), [2**40, 2**40 + 64]),
]
NUMBERS = [0, 1, -3, 7, 2**31, True, 0.0, -0.0, 2.5, float("nan")]


def tensor(dtype: Any, values: list[Any], shape: tuple[int, ...], first: int) -> Any:
    data = np.resize(np.roll(np.array(values), first), shape or (1,))
    array = data.astype(np.uint64 if dtype.is_ptr() else interpreter._remember_np_dtype(dtype))
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(operator: Any, *operands: Any) -> Any:
    """Type, bits and shape of the result; None: refused."""
    with np.errstate(all="ignore"):
        try:
            value = operator(*operands)
        except Exception:
            return None
    data = value.handle.data
    return value.type.name, value.dtype.name, value.handle.dtype.name, data.dtype, data.shape, data.tobytes()


@pytest.mark.parametrize("name", interpreter._OPERATORS)
def test_operators(name: str) -> None:
    flags = (True,) if METHODS[name] in ("add", "sub", "mul") else ()

    def of_triton(left: Any, right: Any) -> Any:
        method = METHODS[name] or ("ashr" if left.dtype.is_int_signed() else "lshr")
        operands = (right, left) if name in ("__radd__", "__rmul__") else (left, right)
        return getattr(TritonSemantic, method)(interpreter_semantic, *operands, *flags)

    fast = interpreter._with_known_types(of_triton, interpreter._OPERATORS[name])
    computed = 0
    for (left, values), (right, others), shape, other in product(VALUES, VALUES, SHAPES, SHAPES):
        for first in range(2):  # Triton's own meets the types first
            operands = tensor(left, values, shape, first), tensor(right, others, other, first)
            expected = outcome(of_triton, *operands)
            assert outcome(fast, *operands) == expected, (left, right, shape, other, first)
            computed += expected is not None
    for (dtype, values), shape, number, _ in product(VALUES, SHAPES, NUMBERS, range(2)):
        operand = tensor(dtype, values, shape, 0)
        expected = outcome(of_triton, operand, number)
        assert outcome(fast, operand, number) == expected, (dtype, shape, number)
        computed += expected is not None
    assert computed > 500


def test_where() -> None:
    conditions = [tensor(tl.int1, [True, False], shape, 0) for shape in SHAPES]
    tensors = [tensor(dtype, values, shape, 0) for (dtype, values), shape in product(VALUES, SHAPES)]
    computed = 0
    for condition in conditions:
        for x, y in product([*tensors, *NUMBERS], repeat=2):
            for _ in range(2):
                expected = outcome(interpreter._where, interpreter_semantic, condition, x, y)
                found = outcome(interpreter._where_of_known_types, interpreter_semantic, condition, x, y)
                assert found == expected, (condition.type, x, y)
            computed += expected is not None
    assert computed > 500


def test_new_axes() -> None:
    interpreter._patch_once()
    x = tensor(tl.int32, [1, 2, 3, 4], (4,), 0)
    for _ in range(2):
        for indexed, shape in ((x[:, None], (4, 1)), (x[None, :], (1, 4))):
            assert indexed.type.name == tl.block_type(tl.int32, list(shape)).name
            assert np.array_equal(indexed.handle.data, np.array([1, 2, 3, 4]).reshape(shape))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (tl.float32, tl.bfloat16),
        (tl.bfloat16, tl.float32),
        (tl.float8e4nv, tl.float32),
        (tl.float8e5, tl.float16),
        (tl.float16, tl.float8e5),
    ],
)
def test_conversions(source: Any, target: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    data = {8: bits.astype(np.uint8), 16: bits, 32: (bits.astype(np.uint32) << 16 | 0x8123).view(np.float32)}
    numbers, exponents = data[source.primitive_bitwidth], np.arange(2**16) >> 7 & 0xFF
    for chosen in (numbers, numbers[exponents > 0], numbers[:8].reshape(2, 4)[:, :3]):
        expected = interpreter._convert_float(chosen, source, target, None)
        actual = interpreter._convert_quickly(chosen, source, target, None)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(actual, expected)


def rounded_to_tf32(handle: Any) -> Any:
    """To 10 bits of mantissa, as tensor cores take factors."""
    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    return TensorHandle(bits.view(np.float32), handle.dtype)


def test_tf32_adds_little_to_the_rounding_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the gated delta rule. The interpreter, which does not round, is made to, in the inverse too.
    Outputs in bfloat16 have 7 bits of mantissa: if the errors are 1 to 0.3, their sum has 1.05."""
    case, dot = case_of((130,)).replace(k_head_dim=64), InterpreterBuilder.create_dot
    exact = run(world_of(case))[0]

    def rounding_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, rounded_to_tf32(a), rounded_to_tf32(b), *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", rounding_dot)
    found = run(world_of(case))[0]
    error, of_output = ((each - exact).square().mean().sqrt() for each in (found, exact.bfloat16().float()))
    assert 0.0 < error < 0.3 * of_output
