"""Kernels of draft trees: selection, masks, acceptance."""
