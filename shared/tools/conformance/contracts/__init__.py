"""The clauses of each component's contract, as checks that run against any implementation."""
