"""Clauses of the contract of `draft_tree`."""
