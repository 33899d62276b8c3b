"""`diptych check kernel`: a bare function held to the truth of one operation in float64."""
