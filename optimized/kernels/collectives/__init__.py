"""Kernels over several GPUs."""
