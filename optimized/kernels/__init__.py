"""Triton kernels in rooms, one idea a file, each with the function that launches it.

Beside the rooms is what several of them use: differences between GPUs (portable.py), the L1 carve-out,
matrix multiplication by tensor cores from registers (warp_mma.py), and measured choices (gpu_table.py).

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

import triton

if triton.knobs.runtime.interpret:
    import diptych.optimized.kernels.interpreter  # noqa: F401
