"""Clauses of the contract of `scheduler`."""
