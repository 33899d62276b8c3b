"""Triton's interpreter, which runs kernels without a GPU, for tests: made faster, with the same results.

numpy computes an operation on a block in microseconds. Most of the interpreter's time goes to what it does
around each operation: it patches the language, and makes shapes and types that it has made before. Here it
patches once, and remembers shapes and types. Imported by `optimized.kernels` where kernels are interpreted.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_init_block_type, _init_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
_np_dtype, _broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value


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


_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], dict[str, Any]] = {}


def _remember_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    values = shape.values if isinstance(shape, tl.tuple) else shape
    key = (element_ty.name, *[v.value if isinstance(v, tl.constexpr) else v for v in values])
    fields = _block_types.get(key)
    if fields is None:
        _init_block_type(self, element_ty, shape)
        fields = _block_types[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
    vars(self).update(fields, element_ty=element_ty)


def _remember_shape(self: Any, handle: Any, type: Any) -> None:
    key = tuple(type.shape.values) if type.is_block() else ()
    fields = _shapes.get(key)
    if fields is None:
        _init_tensor(self, handle, type)
        fields = _shapes[key] = {"shape": self.shape, "numel": self.numel}
    vars(self).update(fields, handle=handle, type=type, dtype=type.scalar)


_np_dtypes: dict[str, Any] = {}


def _remember_np_dtype(dtype: Any) -> Any:
    scalar = dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _np_dtype(scalar)
    return _np_dtypes[scalar.name]


def _broadcast_if_different(self: Any, lhs: Any, rhs: Any) -> Any:
    """Operands of one shape stay as they are."""
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_for_good, _patch_with_index
interpreter._patch_attr = _patch_builtin
interpreter._get_np_dtype = _remember_np_dtype
tl.core.block_type.__init__, tl.core.tensor.__init__ = _remember_block_type, _remember_shape
TritonSemantic.broadcast_impl_value = _broadcast_if_different
# Without the overflow check, which repeats each int32 sum in int64; sizes of tests do not overflow.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
