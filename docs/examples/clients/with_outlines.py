"""outlines: a literal and a model of Pydantic.

pip install outlines openai
"""

import os
import typing

import openai
import outlines
import pydantic


class City(pydantic.BaseModel):
    city: typing.Literal["Bergen", "Lima"]


client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
model = outlines.from_openai(client, "tiny-dense")
assert City.model_validate_json(model("Where?", City, temperature=0)).city
