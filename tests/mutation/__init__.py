"""Mutation campaign: small changes in the source of the engine, each of which some test must notice."""
