"""Kernels of the sampler, and top tokens for drafts."""
