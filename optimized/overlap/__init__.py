"""Overlap scheduling: batches between their launch and the processing of their results."""
