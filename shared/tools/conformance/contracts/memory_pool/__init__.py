"""Clauses of the contract of `memory_pool`."""
