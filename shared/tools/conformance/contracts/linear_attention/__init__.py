"""Clauses of the contract of `linear_attention`."""
