"""The machinery of clauses: cases, comparison, tolerance, shrinking, versions."""
