"""Clauses of the contract of `draft_models`."""
