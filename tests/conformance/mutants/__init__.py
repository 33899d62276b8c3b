"""Planted bugs: each a small change to a correct component, taken from what went wrong in real engines."""

from tests.conformance.mutants.mutant import Mutant, mutant_of

__all__ = ["Mutant", "mutant_of"]
