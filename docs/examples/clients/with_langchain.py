"""LangChain: invoke, stream, bound tools, structured output.

pip install langchain-openai
"""

import os

import langchain_openai

chat = langchain_openai.ChatOpenAI(
    base_url=os.environ["URL"] + "/v1", api_key="none", model="tiny-dense", temperature=0, max_retries=0
)
assert chat.invoke("What is 12 + 30?").content == "12 + 30 = 42"
assert "".join(chunk.content for chunk in chat.stream("What is 12 + 30?")) == "12 + 30 = 42"
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
assert chat.bind_tools([tool], tool_choice="required").invoke("Where?").tool_calls[0]["name"] == "f"
schema = {
    "title": "place",
    "description": "a place",
    "type": "object",
    "properties": {"city": {"enum": ["Bergen", "Lima"]}},
    "required": ["city"],
}
place = chat.with_structured_output(schema, method="json_schema").invoke("Where?")
assert place["city"] in ("Bergen", "Lima")
