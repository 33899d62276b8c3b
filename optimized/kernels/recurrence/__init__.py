"""Kernels of linear attention: convolution, recurrence, and what stands around them."""
