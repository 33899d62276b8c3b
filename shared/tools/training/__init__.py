"""Training of the built-in models: tokenizer, weights, EAGLE-3 head."""
