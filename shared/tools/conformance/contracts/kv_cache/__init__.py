"""Clauses of the contract of `kv_cache`."""
