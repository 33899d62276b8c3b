"""Measurements of the engine. Each writes a table for people and a JSON file for comparisons."""
