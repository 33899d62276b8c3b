"""CUDA graphs: capture, padding and replay of each kind of step."""
