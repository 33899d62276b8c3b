"""anthropic: messages, stream, count_tokens, tool_runner, an overflow that is recognized.

pip install anthropic
"""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0)
args = {
    "model": "tiny-dense",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
}
message = client.messages.create(extra_body={"temperature": 0}, **args)
assert message.content[0].text == "12 + 30 = 42"
assert message._request_id
with client.messages.stream(extra_body={"temperature": 0}, **args) as stream:
    assert stream.get_final_message().content[0].text == "12 + 30 = 42"
assert client.messages.count_tokens(model="tiny-dense", messages=args["messages"]).input_tokens
called = []


@anthropic.beta_tool
def weather(city: str) -> str:
    "Of a city."
    called.append(city)
    return "Rain."


runner = client.beta.messages.tool_runner(
    tools=[weather], tool_choice={"type": "any"}, max_iterations=2, **args
)
assert [message.stop_reason for message in runner]
assert called
try:
    client.messages.create(**{**args, "messages": [{"role": "user", "content": "a " * 100000}]})
    raise SystemExit("no error")
except anthropic.BadRequestError as error:
    assert "prompt is too long" in str(error)
    assert error.request_id
