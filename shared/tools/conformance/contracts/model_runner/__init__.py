"""Clauses of the contract of `model_runner`."""
