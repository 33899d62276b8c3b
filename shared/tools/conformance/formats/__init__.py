"""Kernels in the formats of others: FlashInfer Trace, KernelBench, GPU MODE."""
