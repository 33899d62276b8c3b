"""Clauses of the contract of `dialect`."""
