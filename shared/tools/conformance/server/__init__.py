"""`diptych check server`: compares a server with OpenAI's API with the reference in float32."""
