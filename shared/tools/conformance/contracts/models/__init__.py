"""Clauses of the contract of `models`."""
