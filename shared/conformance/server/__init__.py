"""`diptych check server`: hold a server with OpenAI's API to the reference in float32."""
