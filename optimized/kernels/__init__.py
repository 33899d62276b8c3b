"""Triton kernels, one idea a file, each with the function that launches it.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton

if triton.knobs.runtime.interpret:
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    _everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def _index(self: Any) -> Any:
        return self.handle.data.item()

    def _patch_lang_once(fn: Any) -> Any:
        """Make the interpreter patch the language once. By default it does so before a kernel and before each
        call of a device function, which takes longer than most of these calls."""
        is_patched = getattr(tl.tensor, "__index__", None) is _index
        return None if is_patched else _patch_lang(_everything)

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        """Make the interpreter's scalars usable as integers. They are arrays of one element, which numpy from
        2.4 on does not convert, so that `range` over loaded bounds would fail."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", _index)

    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_lang_once, _patch_with_index
    # Disable the overflow check, which repeats each int32 sum in int64; sizes of tests do not overflow.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
