"""Clauses of the contract of `drafter`."""
