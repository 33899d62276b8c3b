"""Planted bugs: each a small change to a correct component, taken from what went wrong in real engines."""
