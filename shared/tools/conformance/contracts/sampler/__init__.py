"""Clauses of the contract of `sampler`."""
