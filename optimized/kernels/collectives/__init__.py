"""Sums over the GPUs of one computer."""
