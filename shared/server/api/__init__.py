"""The dialects of the API: bodies, their translation to generations, and answers."""
