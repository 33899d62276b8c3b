"""Kernels of attention, of its KV pool (FP8 included), and of the norm and rotation before it."""
