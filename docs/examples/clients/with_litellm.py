"""LiteLLM: chat and stream as OpenAI, messages as Anthropic, its ContextWindowExceededError.

pip install litellm
"""

import os

import litellm

args = {
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "api_key": "none",
    "temperature": 0,
    "num_retries": 0,
}
openai = dict(model="openai/tiny-dense", api_base=os.environ["URL"] + "/v1", **args)
assert litellm.completion(**openai).choices[0].message.content == "12 + 30 = 42"
chunks = litellm.completion(stream=True, **openai)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "12 + 30 = 42"
claude = dict(model="anthropic/tiny-dense", api_base=os.environ["URL"], max_tokens=50, **args)
assert litellm.completion(**claude).choices[0].message.content == "12 + 30 = 42"
try:
    litellm.completion(**{**openai, "messages": [{"role": "user", "content": "a " * 100000}]})
    raise SystemExit("no error")
except litellm.ContextWindowExceededError:
    pass
