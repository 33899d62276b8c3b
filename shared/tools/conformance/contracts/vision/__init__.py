"""Clauses of the contract of `vision`."""
