"""Checks of whole engines: accuracy, switches, soak."""
