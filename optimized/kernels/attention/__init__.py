"""Kernels of attention, of its KV pool and of the rotary embedding before it."""
