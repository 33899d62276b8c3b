"""Ranks and replicas: processes, how they start, and the messages that keep them in step."""
