"""MoE runners, which compute the routed experts of a layer. `table` has their names and requirements."""
