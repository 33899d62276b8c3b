"""Several servers behind one address: a cache-aware router, Ray Serve."""
