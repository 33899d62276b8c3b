"""The serving mode: an API process (HTTP, text) and an engine process (tokens), joined by typed messages.

messages.py        what the two processes say to each other
engine_loop.py     the engine's side: messages in, scheduler steps, messages out
engine_process.py  starting the engine in a process or a thread, and ending it
engine_client.py   the API's side: one asyncio object for all requests
generation.py      one HTTP request: prompts times samples, merged deltas, cancellation
protocol.py        the bodies of requests; chat.py, completions.py ... translate them and the answers
responses.py       /v1/responses, and anthropic.py /v1/messages: translations of chat chunks
answers.py         a stream of events, or their fold
status.py          the status page
app.py             the routes
"""
