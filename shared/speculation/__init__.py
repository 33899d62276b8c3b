"""What the speculative decoding of both panels shares."""
