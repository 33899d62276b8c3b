"""Kernels of draft trees: beams, choice, links, masks, acceptance."""
