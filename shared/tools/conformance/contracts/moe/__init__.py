"""Clauses of the contract of `moe`."""
