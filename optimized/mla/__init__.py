"""Multi-head latent attention: attention backends, memory pool and layers."""
