"""Clauses of the contract of `expert_balancer`."""
