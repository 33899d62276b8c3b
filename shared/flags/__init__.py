"""The flags of the engine, and what a flag is. Imports nothing heavy: the command line starts with it."""
