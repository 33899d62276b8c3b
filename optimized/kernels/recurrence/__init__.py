"""Kernels of linear attention: convolution, recurrence, and what stands around them. They have run in the
interpreter alone."""
