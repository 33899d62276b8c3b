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
        """The interpreter patches the language before a kernel, and again before each call of a device
        function, which takes longer than most of them. Once, and all of it, is enough."""
        is_patched = getattr(tl.tensor, "__index__", None) is _index
        return None if is_patched else _patch_lang(_everything)

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, which numpy no longer takes for numbers from
        2.4 on: `range` over loaded bounds would fail."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", _index)

    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_lang_once, _patch_with_index
    # Each sum of int32 is done again in int64 to see whether it overflows: sizes that fit a test never do.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
