"""Several ranks: collectives, symmetric memory, expert parallelism."""
