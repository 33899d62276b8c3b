"""Builds an engine from its configuration."""
