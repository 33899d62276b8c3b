"""Several ranks: collectives, pipelines, disaggregation, expert parallelism."""
