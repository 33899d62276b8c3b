"""Clauses of the contract of `detokenizer`."""
