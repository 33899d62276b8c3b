"""Clauses of the contract of `prefill_adder`."""
