"""Multi-head latent attention: its attention, memory pool and layers."""
