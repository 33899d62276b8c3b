"""Functions that the models of both panels share."""
