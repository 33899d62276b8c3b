"""Clauses of the contract of `quantized_experts`."""
