"""Planted bugs: each a small change to a correct component, taken from what went wrong in real engines."""

from tests.conformance.mutants.mutant import PLANTED, Mutant, mutant_of

__all__ = ["PLANTED", "Mutant", "mutant_of"]
