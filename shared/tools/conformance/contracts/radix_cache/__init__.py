"""Clauses of the contract of `radix_cache`."""
