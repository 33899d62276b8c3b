"""What each public client does in its recorded run: scripts that fail when an answer is not as expected."""

from __future__ import annotations

from typing import NamedTuple


class Client(NamedTuple):
    """packages: the first one names the client's environment. `script`: Python, JavaScript or, of a command,
    shell. It reads URL from its environment."""

    name: str
    kind: str  # python, node, or shell: a command of a Python package, node-shell: of a Node package
    packages: tuple[str, ...]
    does: str
    script: str


MESSAGES = '[{"role": "user", "content": "What is 12 + 30?"}]'
CITY = '{"type": "object", "properties": {"city": {"enum": ["Bergen", "Lima"]}}, "required": ["city"]}'

CLIENTS = (
    Client(
        "openai",
        "python",
        ("openai",),
        "chat, stream, a required tool call, parsed output, responses, an overflow that is recognized",
        f"""
import os, openai, pydantic, typing
client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none", max_retries=0)
args = dict(model="tiny-dense", messages={MESSAGES}, temperature=0, store=True, prompt_cache_key="k")
assert client.chat.completions.create(**args).choices[0].message.content == "12 + 30 = 42"
chunks = client.chat.completions.create(stream=True, **args)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "12 + 30 = 42"
tool = {{"type": "function", "function": {{"name": "f", "parameters": {CITY}}}}}
called = client.chat.completions.create(tools=[tool], tool_choice="required", **args).choices[0].message
assert called.tool_calls[0].function.name == "f"
class City(pydantic.BaseModel):
    city: typing.Literal["Bergen", "Lima"]
assert client.chat.completions.parse(response_format=City, **args).choices[0].message.parsed.city
response = client.responses.create(model="tiny-dense", input="What is 12 + 30?", temperature=0)
assert response.output_text == "12 + 30 = 42" and response._request_id
try:
    client.chat.completions.create(**{{**args, "messages": [{{"role": "user", "content": "a " * 100000}}]}})
    raise SystemExit("no error")
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded" and error.request_id
""",
    ),
    Client(
        "anthropic",
        "python",
        ("anthropic",),
        "messages, stream, count_tokens, tool_runner, an overflow that is recognized",
        f"""
import os, anthropic
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0)
args = dict(model="tiny-dense", max_tokens=64, messages={MESSAGES})
message = client.messages.create(extra_body={{"temperature": 0}}, **args)
assert message.content[0].text == "12 + 30 = 42" and message._request_id
with client.messages.stream(extra_body={{"temperature": 0}}, **args) as stream:
    assert stream.get_final_message().content[0].text == "12 + 30 = 42"
assert client.messages.count_tokens(model="tiny-dense", messages=args["messages"]).input_tokens
called = []
@anthropic.beta_tool
def weather(city: str) -> str:
    "Of a city."
    called.append(city)
    return "Rain."
runner = client.beta.messages.tool_runner(
    tools=[weather], tool_choice={{"type": "any"}}, max_iterations=2, **args)
assert [message.stop_reason for message in runner] and called
try:
    client.messages.create(**{{**args, "messages": [{{"role": "user", "content": "a " * 100000}}]}})
    raise SystemExit("no error")
except anthropic.BadRequestError as error:
    assert "prompt is too long" in str(error) and error.request_id
""",
    ),
    Client(
        "LiteLLM",
        "python",
        ("litellm",),
        "chat and stream as OpenAI, messages as Anthropic, its ContextWindowExceededError",
        f"""
import os, litellm
args = dict(messages={MESSAGES}, api_key="none", temperature=0, num_retries=0)
openai = dict(model="openai/tiny-dense", api_base=os.environ["URL"] + "/v1", **args)
assert litellm.completion(**openai).choices[0].message.content == "12 + 30 = 42"
chunks = litellm.completion(stream=True, **openai)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "12 + 30 = 42"
claude = dict(model="anthropic/tiny-dense", api_base=os.environ["URL"], max_tokens=50, **args)
assert litellm.completion(**claude).choices[0].message.content == "12 + 30 = 42"
try:
    litellm.completion(**{{**openai, "messages": [{{"role": "user", "content": "a " * 100000}}]}})
    raise SystemExit("no error")
except litellm.ContextWindowExceededError:
    pass
""",
    ),
    Client(
        "LangChain",
        "python",
        ("langchain-openai",),
        "invoke, stream, bound tools, structured output",
        f"""
import os, langchain_openai
chat = langchain_openai.ChatOpenAI(base_url=os.environ["URL"] + "/v1", api_key="none", model="tiny-dense",
                                   temperature=0, max_retries=0)
assert chat.invoke("What is 12 + 30?").content == "12 + 30 = 42"
assert "".join(chunk.content for chunk in chat.stream("What is 12 + 30?")) == "12 + 30 = 42"
tool = {{"type": "function", "function": {{"name": "f", "parameters": {CITY}}}}}
assert chat.bind_tools([tool], tool_choice="required").invoke("Where?").tool_calls[0]["name"] == "f"
schema = {{"title": "place", "description": "a place", **{CITY}}}
place = chat.with_structured_output(schema, method="json_schema").invoke("Where?")
assert place["city"] in ("Bergen", "Lima")
""",
    ),
    Client(
        "openai-agents",
        "python",
        ("openai-agents",),
        "an agent with a tool, over responses and over chat",
        """
import os, agents, openai
agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=os.environ["URL"] + "/v1", api_key="none", max_retries=0)
@agents.function_tool
def weather(city: str) -> str:
    return "Rain."
for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    settings = agents.ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    model = kind(model="tiny-dense", openai_client=client)
    agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[weather],
                         model_settings=settings, tool_use_behavior="stop_on_first_tool")
    assert agents.Runner.run_sync(agent, "How is the weather in Lima?", max_turns=2).final_output == "Rain."
""",
    ),
    Client(
        "instructor",
        "python",
        ("instructor",),
        "a model of Pydantic, in the modes of tools and of JSON schema",
        """
import os, instructor, openai, pydantic, typing
class City(pydantic.BaseModel):
    city: typing.Literal["Bergen", "Lima"]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    plain = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
    client = instructor.from_openai(plain, mode=mode)
    city = client.chat.completions.create(model="tiny-dense", response_model=City, max_retries=0,
                                          temperature=0, messages=[{"role": "user", "content": "Where?"}])
    assert city.city in ("Bergen", "Lima")
""",
    ),
    Client(
        "outlines",
        "python",
        ("outlines", "openai"),
        "a literal and a model of Pydantic",
        """
import os, openai, outlines, pydantic, typing
class City(pydantic.BaseModel):
    city: typing.Literal["Bergen", "Lima"]
client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
model = outlines.from_openai(client, "tiny-dense")
assert City.model_validate_json(model("Where?", City, temperature=0)).city
""",
    ),
    Client(
        "aider",
        "shell",
        ("aider-chat",),
        "one message about a file, without edits",
        """
cd "$(mktemp -d)" && git init -q . && echo "x = 1" > a.py
export OPENAI_API_BASE=$URL/v1 OPENAI_API_KEY=none
aider --model openai/tiny-dense --no-auto-commits --no-stream --map-tokens 0 --yes-always --no-check-update \\
  --no-analytics --edit-format ask --no-show-model-warnings --message "Hi" < /dev/null | tee log
grep -q "Tokens:" log
""",
    ),
    Client(
        "Vercel AI SDK",
        "node",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"),
        "text and stream of the three providers: openai-compatible, openai (responses), anthropic; an object",
        """
import { generateText, streamText, generateObject } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { z } from "zod";
const baseURL = process.env.URL + "/v1", apiKey = "none";
const settings = { name: "d", baseURL, apiKey, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible(settings)("tiny-dense");
const models = [compatible, createOpenAI({ baseURL, apiKey })("tiny-dense"),
                createAnthropic({ baseURL, apiKey })("tiny-dense")];
for (const model of models) {
  const ask = { model, prompt: "What is 12 + 30?", temperature: 0, maxRetries: 0, maxOutputTokens: 64 };
  const { text } = await generateText(ask);
  if (text !== "12 + 30 = 42") throw new Error(text);
  let streamed = "";
  for await (const piece of streamText(ask).textStream) streamed += piece;
  if (streamed !== text) throw new Error(streamed);
}
const schema = z.object({ city: z.enum(["Bergen", "Lima"]) });
const where = { model: compatible, schema, prompt: "Where?", temperature: 0, maxRetries: 0 };
const { object } = await generateObject(where);
if (!object.city) throw new Error("no city");
""",
    ),
    Client(
        "Codex CLI",
        "node-shell",
        ("@openai/codex",),
        "`codex exec` with the server as a provider over responses",
        """
export CODEX_HOME="$(mktemp -d)" && cd "$CODEX_HOME" && mkdir work
cat > config.toml << EOF
model = "tiny-dense"
model_provider = "d"
model_context_window = 65536
[model_providers.d]
name = "d"
base_url = "$URL/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
EOF
codex exec --skip-git-repo-check -C work --json "Hi" < /dev/null | tee log
grep -q '"turn.completed"' log
""",
    ),
    Client(
        "Claude Code",
        "node-shell",
        ("@anthropic-ai/claude-code",),
        "`claude -p` with the server in place of Anthropic's",
        """
export HOME="$(mktemp -d)" && cd "$HOME"
export ANTHROPIC_BASE_URL=$URL ANTHROPIC_API_KEY=none
export ANTHROPIC_MODEL=tiny-dense ANTHROPIC_SMALL_FAST_MODEL=tiny-dense DISABLE_TELEMETRY=1
export DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=2048
claude -p "Hi" --output-format json < /dev/null | tee log
grep -q '"is_error":false' log
""",
    ),
)
