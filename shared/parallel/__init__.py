"""Parallelism: code that both panels share."""
