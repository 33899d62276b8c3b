"""Clauses of the contract of `transport`."""
