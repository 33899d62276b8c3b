"""instructor: a model of Pydantic, in the modes of tools and of JSON schema.

pip install instructor
"""

import os
import typing

import instructor
import openai
import pydantic


class City(pydantic.BaseModel):
    city: typing.Literal["Bergen", "Lima"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    plain = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
    client = instructor.from_openai(plain, mode=mode)
    city = client.chat.completions.create(
        model="tiny-dense",
        response_model=City,
        max_retries=0,
        temperature=0,
        messages=[{"role": "user", "content": "Where?"}],
    )
    assert city.city in ("Bergen", "Lima")
