"""Clauses of the contract of `mla_attention`."""
