"""A model that calls tools and thinks: tiny-dense, an adapter, and a chat template in Qwen3's form."""
