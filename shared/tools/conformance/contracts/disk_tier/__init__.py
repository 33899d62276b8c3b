"""Clauses of the contract of `disk_tier`."""
