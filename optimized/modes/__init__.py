"""Modes that a configuration turns on: deterministic, LoRA, block diffusion."""
