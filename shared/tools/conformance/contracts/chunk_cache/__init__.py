"""Clauses of the contract of `chunk_cache`."""
