"""Triton kernels, one idea a file, each with the function that launches it.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

import triton

if triton.knobs.runtime.interpret:
    import diptych.optimized.kernels.interpreter  # noqa: F401
