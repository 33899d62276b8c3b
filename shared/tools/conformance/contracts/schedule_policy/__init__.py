"""Clauses of the contract of `schedule_policy`."""
