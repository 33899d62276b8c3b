"""Quantized linear layers and experts."""
