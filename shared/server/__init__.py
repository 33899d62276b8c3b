"""The serving mode: an API process (HTTP, text) and an engine process (tokens), joined by typed messages.

engine/   messages.py, what the two processes say; engine_loop.py, the engine's side: messages in, scheduler
          steps, messages out; engine_client.py, the API's side; engine_process.py starts and ends the engine
api/      the dialects. body.py and protocol.py have the bodies of requests; chat.py, completions.py ...
          translate them and the answers; responses.py and anthropic.py translate chat chunks; generation.py
          is one HTTP request: prompts times samples, cancellation; answers.py a stream of events, or its fold
http/     app.py, the routes and their errors; access, limits, connections, metrics, the status page
router/   several servers behind one address
serve.py  one server from start to end
"""
