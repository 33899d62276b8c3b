"""Clauses of the contract of `mla_memory_pool`."""
