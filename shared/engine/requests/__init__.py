"""Requests of the Python API: kinds of prompts, their checks, adapters, and gathered outputs."""
