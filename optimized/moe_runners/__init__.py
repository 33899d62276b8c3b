"""MoE runners: what computes the routed experts of a layer. `table` has their names and what they need."""
