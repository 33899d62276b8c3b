"""Sampling parameters as tensors, log-probabilities, noise."""
