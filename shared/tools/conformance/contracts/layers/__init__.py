"""Clauses of the contract of `layers`."""
