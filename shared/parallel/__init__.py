"""What collectives of both panels share."""
