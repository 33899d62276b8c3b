"""Modes that a configuration turns on: deterministic, LoRA, vision, input embeddings, block diffusion."""
