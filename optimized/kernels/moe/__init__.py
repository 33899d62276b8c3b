"""Kernels of mixture of experts: routing, sorting, GEMM, GEMV, sum, and the choice of tiles."""
