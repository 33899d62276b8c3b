"""Clauses of the contract of `attention`."""
