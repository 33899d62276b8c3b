"""openai-agents: an agent with a tool, over responses and over chat.

pip install openai-agents
"""

import os

import agents
import openai

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=os.environ["URL"] + "/v1", api_key="none", max_retries=0)


@agents.function_tool
def weather(city: str) -> str:
    return "Rain."


for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    settings = agents.ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    model = kind(model="tiny-dense", openai_client=client)
    agent = agents.Agent(
        name="a",
        instructions="Be brief.",
        model=model,
        tools=[weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    assert agents.Runner.run_sync(agent, "How is the weather in Lima?", max_turns=2).final_output == "Rain."
