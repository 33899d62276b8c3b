"""Kernels of mixture of experts: routing, alignment, GEMMs, combination."""
