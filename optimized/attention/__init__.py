"""Attention backends: one file each, imported when chosen."""
