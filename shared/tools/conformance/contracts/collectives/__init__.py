"""Clauses of the contract of `collectives`."""
