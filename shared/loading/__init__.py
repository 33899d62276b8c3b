"""Loads a model folder to a device, and sizes the pools."""
