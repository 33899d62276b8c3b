"""The engine in one process: assembly of the components, `LLM`, and the collection of its outputs."""
