"""Triton's interpreter, which runs kernels without a GPU, for tests: made faster, and alike on all CPUs.

numpy computes an operation on a block in microseconds. Most of the interpreter's time goes to what it does
around each operation: it patches the language, and makes shapes and types that it has made before. Here it
patches once, and remembers shapes and types. Operators and `tl.where` give arrays to numpy at once if they
have met operands of the same types before. Imported by `diptych.optimized.kernels` where kernels are
interpreted.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_init_block_type, _init_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
_broadcast, _where = TritonSemantic.broadcast_impl_value, TritonSemantic.where
_load = TritonSemantic.load
_np_dtype, _convert_float = interpreter._get_np_dtype, interpreter._convert_float
_is_equal_dtype = tl.core.dtype.__eq__
_create_dot, _read = interpreter.InterpreterBuilder.create_dot, interpreter._interpreter.load


@cache
def _patch_once() -> None:
    _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _patch_for_good(fn: Any) -> Any:
    """By default the interpreter patches the language before a kernel and before each call of a device
    function, and undoes it after the kernel. This takes longer than most of these calls."""
    _patch_once()
    return SimpleNamespace(restore=lambda: None)


def _patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language gets the interpreter without a check whether it has one."""
    fn, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def builtin(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return fn(*args, **kwargs)

    scope.set_attr(obj, name, builtin)


def _index(self: Any) -> Any:
    return self.handle.data.item()


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Make the interpreter's scalars usable as integers. They are arrays of one element, which numpy from 2.4
    on does not convert, so that `range` over loaded bounds would fail."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", _index)
    for name, numpy_operator in _OPERATORS.items():
        scope.set_attr(tensor, name, _with_known_types(getattr(tensor, name), numpy_operator))
    scope.set_attr(tensor, "__getitem__", _index_of_known_types(tensor.__getitem__))


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Float32 sums are rounded once. BLAS for CPUs without AVX-512 adds a row of a block in an order that
    depends on the row's place, and a GPU does not."""
    if a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
        sums = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)
    return _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)


_OPERATORS: dict[str, Any] = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply,
    "__rmul__": np.multiply, "__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift, "__rshift__": np.right_shift, "__lt__": np.less, "__le__": np.less_equal,
    "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
_ARITHMETIC = (np.add, np.subtract, np.multiply, np.left_shift, np.right_shift)


def _with_known_types(operator: Any, numpy_operator: Any) -> Any:
    """The operator of Triton, which checks and converts types and repeats scalars, is asked once for each
    pair of types. numpy repeats scalars itself."""
    known: dict[tuple[Any, Any], tuple[Any, Any] | None] = {}

    def apply(self: Any, other: Any) -> Any:
        is_tensor = isinstance(other, tl.tensor)
        pair = (self.type.name, other.type.name if is_tensor else type(other))
        if pair not in known:
            value = operator(self, other)
            compute = _numpy_form(numpy_operator, self.dtype, other)
            known[pair] = compute and (compute, value.handle.dtype, value.type)
            return value
        form = known[pair]
        if form is None:
            return operator(self, other)
        compute, dtype, result_type = form
        handle = self.handle
        right = other.handle.data if is_tensor else _number(other, self.dtype)
        return tl.tensor(interpreter.TensorHandle(compute(handle.data, right), dtype), result_type)

    return apply


def _numpy_form(numpy_operator: Any, dtype: Any, other: Any) -> Any:
    """A function of two arrays that has the result of Triton's operator on a tensor of this type and `other`;
    None: there is no simple one."""
    if isinstance(other, tl.tensor):
        if dtype.is_ptr():
            return _move(dtype) if numpy_operator is np.add and other.dtype.is_int() else None
        alike = dtype == other.dtype or _numpy_promotes_alike(dtype, other.dtype)
    elif dtype.is_ptr():
        return _move(dtype) if numpy_operator is np.add and type(other) is int else None
    else:
        alike = type(other) is int or (type(other) is float and dtype.is_floating())
    # Triton's one-bit integers wrap around; numpy's booleans do not.
    is_bit = dtype.is_int1() and (numpy_operator in _ARITHMETIC or not isinstance(other, tl.tensor))
    return numpy_operator if alike and not is_bit else None


def _numpy_promotes_alike(*dtypes: Any) -> bool:
    """Whether numpy's result has the wider of the two types, as Triton's has."""
    if not all(each.is_standard_floating() or (each.is_int() and not each.is_int1()) for each in dtypes):
        return False
    types = [_remember_np_dtype(each) for each in dtypes]
    return np.result_type(*types) in types


def _move(pointer: Any) -> Any:
    width = np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
    return lambda data, offset: data + width * offset.astype(np.uint64)


def _index_of_known_types(index: Any) -> Any:
    """`x[:, None]` without a new type each time. All indices are `:` or None, as numpy has them."""
    known: dict[tuple[Any, ...], Any] = {}

    def apply(self: Any, slices: Any) -> Any:
        if not (isinstance(slices, tuple) and self.type.is_block()):
            return index(self, slices)
        key = (self.type.name, *[s is None for s in slices])
        if key not in known:
            value = index(self, slices)
            known[key] = value.type
            return value
        handle = self.handle
        return tl.tensor(interpreter.TensorHandle(handle.data[slices], handle.dtype), known[key])

    return apply


_numbers: dict[tuple[Any, ...], Any] = {}


def _number(value: Any, dtype: Any) -> Any:
    """An array of one element. Zero, whose sign is not part of a key, is made anew."""
    key = (type(value), value, dtype.name)
    data = _numbers.get(key)
    if data is None:
        semantic = interpreter.interpreter_semantic
        number = semantic.to_tensor(value) if dtype.is_ptr() else semantic.scalar_constant(value, dtype)
        data = number.handle.data
        if value:
            _numbers[key] = data
    return data


_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[str, tuple[Any, ...]] = {}


def _remember_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    values = shape.values if isinstance(shape, tl.tuple) else shape
    key = (element_ty.name, *[v.value if isinstance(v, tl.constexpr) else v for v in values])
    fields = _block_types.get(key)
    if fields is None:
        _init_block_type(self, element_ty, shape)
        fields = _block_types[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
    vars(self).update(fields, element_ty=element_ty)


def _remember_shape(self: Any, handle: Any, type: Any) -> None:
    fields = _shapes.get(type.name)  # of a block, the name has the shape
    if fields is None:
        _init_tensor(self, handle, type)
        fields = _shapes[type.name] = (self.shape, self.numel, type.scalar)
    self.handle, self.type = handle, type
    self.shape, self.numel, self.dtype = fields


def _init_handle(self: Any, data: Any, dtype: Any) -> None:
    """Without a check of its own code: whether the array is as wide as the type."""
    self.data, self.dtype, self.attr = data, dtype, {}


@cache
def _range(start: int, stop: int) -> Any:
    numbers = np.arange(start, stop, dtype=np.int32)
    numbers.setflags(write=False)
    return numbers


_np_dtypes: dict[str, Any] = {}


def _remember_np_dtype(dtype: Any) -> Any:
    scalar = dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _np_dtype(scalar)
    return _np_dtypes[scalar.name]


@cache
def _converted(source: Any, target: Any, rounding_mode: Any) -> Any:
    """The conversion of every number of a type of 8 or 16 bits."""
    bits = source.primitive_bitwidth
    return _convert_float(np.arange(2**bits, dtype=f"uint{bits}"), source, target, rounding_mode)


def _convert_quickly(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Small types by a table; float32 to bfloat16, which has the same exponents, by a shift. Triton does
    not shift subnormal numbers."""
    bits = data.view(f"uint{source.primitive_bitwidth}")
    if source.primitive_bitwidth <= 16:
        return _converted(source, target, rounding_mode)[bits]
    is_shift = rounding_mode is None and source.name == "fp32" and target.name == "bf16"
    if is_shift and not np.any((bits & 0x7F800000 == 0) & (bits & 0x7FFFFFFF != 0)):
        return (bits >> 16).astype(np.uint16)
    return _convert_float(data, source, target, rounding_mode)


def _is_same_dtype(self: Any, other: Any) -> Any:
    return self is other or _is_equal_dtype(self, other)


def _broadcast_if_different(self: Any, lhs: Any, rhs: Any) -> Any:
    """Operands of one shape stay as they are."""
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


_selected: dict[tuple[Any, ...], Any] = {}
"""Types of a condition and two values -> type of the result; None: values are converted."""


def _where_of_known_types(self: Any, condition: Any, x: Any, y: Any) -> Any:
    key = (condition.type.name, *[v.type.name if isinstance(v, tl.tensor) else type(v) for v in (x, y)])
    result_type = _selected.get(key)
    if result_type is None:
        value = _where(self, condition, x, y)
        dtypes = [v.dtype for v in (x, y) if isinstance(v, tl.tensor)]
        numbers = (int, float) if value.dtype.is_floating() else (int,)
        is_plain = all(isinstance(v, tl.tensor) or type(v) in numbers for v in (x, y))
        is_plain &= bool(dtypes) and all(dtype == value.dtype for dtype in dtypes)
        is_plain &= condition.dtype.is_int1() and not value.dtype.is_ptr()
        _selected[key] = value.type if is_plain else None
        return value
    dtype = result_type.scalar
    values = [v.handle.data if isinstance(v, tl.tensor) else _number(v, dtype) for v in (x, y)]
    selected = np.where(condition.handle.data, *values)
    return tl.tensor(interpreter.TensorHandle(selected, dtype), result_type)


@cache
def _zeros(shape: Any, dtype: Any) -> Any:
    zeros = np.zeros(shape, dtype)
    zeros.setflags(write=False)
    return zeros


_loaded: dict[str, Any] = {}
"""Type of a block of pointers -> type of what is there."""


def _load_or_zeros(self: Any, ptr: Any, mask: Any, other: Any, *more: Any) -> Any:
    """A mask of the same shape and zeros elsewhere, which is what most loads ask for."""
    if mask is None or other is None or not (ptr.type.is_block() and mask.type.is_block()):
        return _load(self, ptr, mask, other, *more)
    element, data = ptr.dtype.element_ty, ptr.handle.data
    is_zero = not other.type.is_block() and not other.handle.data.view(np.uint8).any()
    if not is_zero or element.is_int1() or mask.handle.data.shape != data.shape:
        return _load(self, ptr, mask, other, *more)
    result_type = _loaded.get(ptr.type.name)
    if result_type is None:
        result_type = _loaded[ptr.type.name] = tl.block_type(element, ptr.type.shape)
    dtype = _remember_np_dtype(element)
    found = _read(data, mask.handle.data, _zeros(data.shape, dtype), dtype)
    return tl.tensor(interpreter.TensorHandle(found, element), result_type)


interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_for_good, _patch_with_index
interpreter._patch_attr = _patch_builtin
interpreter._get_np_dtype, interpreter._convert_float = _remember_np_dtype, _convert_quickly
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_make_range = lambda self, of_type, start, stop: (
    interpreter.TensorHandle(_range(start, stop), tl.int32)
)
interpreter.TensorHandle.__init__ = _init_handle
tl.core.dtype.__eq__ = _is_same_dtype
tl.core.block_type.__init__, tl.core.tensor.__init__ = _remember_block_type, _remember_shape
TritonSemantic.broadcast_impl_value, TritonSemantic.where = _broadcast_if_different, _where_of_known_types
TritonSemantic.load = _load_or_zeros
# Without the overflow check, which repeats each int32 sum in int64; sizes of tests do not overflow.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
