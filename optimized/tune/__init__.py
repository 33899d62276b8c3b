"""Measures which kernels and tiles are fastest on this GPU, and writes the table of choices."""
