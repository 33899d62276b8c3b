"""Comparison of two engines, precisions or servers: the first difference, and reports of it."""
