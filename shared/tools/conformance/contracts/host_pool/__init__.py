"""Clauses of the contract of `host_pool`."""
