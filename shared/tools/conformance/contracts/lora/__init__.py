"""Clauses of the contract of `lora`."""
