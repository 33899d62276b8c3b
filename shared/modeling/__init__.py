"""What the models of both panels share."""
