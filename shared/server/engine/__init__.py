"""The engine behind the server: its process, its loop, messages, and the client of the API process."""
