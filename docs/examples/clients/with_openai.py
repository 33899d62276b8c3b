"""openai: chat, stream, a required tool call, parsed output, responses, an overflow that is recognized.

pip install openai
"""

import os
import typing

import openai
import pydantic

client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none", max_retries=0)
args = {
    "model": "tiny-dense",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
    "store": True,
    "prompt_cache_key": "k",
}
assert client.chat.completions.create(**args).choices[0].message.content == "12 + 30 = 42"
chunks = client.chat.completions.create(stream=True, **args)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "12 + 30 = 42"
tool = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bergen", "Lima"]}},
            "required": ["city"],
        },
    },
}
called = client.chat.completions.create(tools=[tool], tool_choice="required", **args).choices[0].message
assert called.tool_calls[0].function.name == "f"


class City(pydantic.BaseModel):
    city: typing.Literal["Bergen", "Lima"]


assert client.chat.completions.parse(response_format=City, **args).choices[0].message.parsed.city
response = client.responses.create(model="tiny-dense", input="What is 12 + 30?", temperature=0)
assert response.output_text == "12 + 30 = 42"
assert response._request_id
try:
    client.chat.completions.create(**{**args, "messages": [{"role": "user", "content": "a " * 100000}]})
    raise SystemExit("no error")
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
    assert error.request_id
