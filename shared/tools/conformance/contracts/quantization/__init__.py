"""Clauses of the contract of `quantization`."""
