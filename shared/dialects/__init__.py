"""Dialects: one file for each family of models. The parts that they are made of are in `parts`."""
