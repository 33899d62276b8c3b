"""What dialects share: the stream that they read, blocks of calls, JSON calls, typed values, detection."""
