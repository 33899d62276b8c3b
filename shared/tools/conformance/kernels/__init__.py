"""`diptych check kernel`: compares a bare function with the exact result of one operation in float64."""
