"""A run of the engine, recorded step by step, as one HTML file that plays it."""
