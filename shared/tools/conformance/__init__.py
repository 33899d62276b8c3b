"""Checks of implementations against contracts and against each other: clauses, oracles, comparisons."""
