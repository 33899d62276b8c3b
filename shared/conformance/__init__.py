"""What holds two implementations together: invariants, oracles and comparers that tests and users share."""
